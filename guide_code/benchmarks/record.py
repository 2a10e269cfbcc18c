"""What a result must carry to mean anything: machine, versions, date and the command that repeats it."""

import json
import os
import platform
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
"""Goes up when a reader of older files would misread newer ones."""


def header(benchmark: str, command: str) -> dict[str, Any]:
    """The first fields of every result.

    Args:
        benchmark: "experts", "switch" or "convert".
        command: what to type to repeat it.
    """
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "command": command,
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores, threads, memory, and the GPU or None."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    pages = "SC_PHYS_PAGES" in os.sysconf_names
    return {
        "cpu": _cpu(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9) if pages else None,
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu,
    }


def versions() -> dict[str, str]:
    """Python, and the installed ones of what is measured."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write JSON beside its place and rename it: a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read_result(path: Path, benchmark: str) -> dict[str, Any]:
    """Read a result of one kind.

    Raises:
        ValueError: the file is no result of that benchmark, or of another schema.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    kind, schema = (result.get("benchmark"), result.get("schema")) if isinstance(result, dict) else (None, None)
    if kind != benchmark or schema != SCHEMA:
        raise ValueError(
            f"{path} holds benchmark={kind!r}, schema={schema!r}; wanted {benchmark!r}, {SCHEMA}: measure again"
        )
    return result


def describe(result: dict[str, Any]) -> str:
    """One line: machine, versions, date."""
    where, found = result["machine"], result["versions"]
    gpu = where["gpu"] or "no GPU"
    libraries = ", ".join(f"{name} {version}" for name, version in found.items())
    return (
        f"{where['cpu']} ({where['instructions']}), {where['threads']} threads on {where['cores']} cores, "
        f"{where['memory_gb']} GB, {gpu}; {libraries}; {result['date']}"
    )


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
