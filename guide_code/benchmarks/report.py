"""Results as Markdown: what was reached of each goal, and the times behind it. For the page that shows them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from guide_code.benchmarks.record import describe, read_result

PEER_GOAL = 0.9
"""Of the time of the fastest implementation in transformers."""
PEER_FLOOR = 1.15
"""In units of the floor; where the peer is already there, being there as well is enough."""
MANY_TOKENS, MANY_GOAL = 2048, 1.2
"""At so many tokens at most so many floors."""
ONE_GOAL = 1.3
"""At one token at most so many times the streaming of the active weights."""


class Verdict(NamedTuple):
    """A case, and how "auto" did."""

    shape: str
    dtype: str
    mode: str
    tokens: int
    routing: str
    ms: float
    to_floor: float
    floor: str
    to_best_peer: float | None
    best_peer: str
    backend: str
    met: bool


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """Of every case in which "auto" was timed.

    Args:
        result: of ``moe-guide bench experts``.
    """
    return list(_verdicts(result))


def _verdicts(result: dict[str, Any]) -> Iterator[Verdict]:
    for case in result["cases"]:
        row = case["rows"].get("auto", {})
        if "median_ms" not in row:
            continue
        floor, peer = row["to_floor"], row["to_best_peer"]
        best = case["rows"].get(case["best_peer"], {}).get("to_floor")
        met = peer is None or peer <= PEER_GOAL or (best is not None and best <= PEER_FLOOR and floor <= PEER_FLOOR)
        if case["mode"] == "forward" and case["tokens"] >= MANY_TOKENS:
            met = met and floor <= MANY_GOAL
        if case["mode"] == "forward" and case["tokens"] == 1:
            met = met and floor <= ONE_GOAL
        yield Verdict(
            case["shape"]["name"], case["dtype"], case["mode"], case["tokens"], case["routing"], row["median_ms"],
            floor, case["floor"], peer, case["best_peer"] or "", case["auto"]["backend"], met,
        )  # fmt: skip


def experts_table(result: dict[str, Any]) -> str:
    """One line per case: time, floor, best peer, and whether the goals are met."""
    lines = [
        "| experts | dtype | mode | tokens | ms | in floors | to the best of transformers | auto took | goal |",
        "|---|---|---|--:|--:|--:|--:|---|---|",
    ]
    sizes = {case["shape"]["name"]: case["shape"]["num_experts"] for case in result["cases"]}
    for v in verdicts(result):
        peer = "" if v.to_best_peer is None else f"{v.to_best_peer:.2f} ({v.best_peer})"
        tokens = f"{v.tokens}" if v.routing == "balanced" else f"{v.tokens}, {v.routing}"
        lines.append(
            f"| {sizes[v.shape]} | {v.dtype} | {v.mode} | {tokens} | {v.ms:.3g} | {v.to_floor:.2f} ({v.floor}) "
            f"| {peer} | {v.backend} | {'met' if v.met else 'missed'} |"
        )
    return "\n".join(lines)


def memory_table(result: dict[str, Any], tokens: int = MANY_TOKENS) -> str:
    """Peak memory beyond what was there before the call, ours against transformers' ``grouped_mm``, in MB."""
    lines = ["| experts | dtype | mode | guide | transformers grouped_mm |", "|---|---|---|--:|--:|"]
    for case in result["cases"]:
        peaks = [case["rows"].get(way, {}).get("peak_bytes") for way in ("auto", "grouped_mm")]
        if case["tokens"] == tokens and None not in peaks:
            ours, theirs = (f"{peak / 1e6:.0f}" for peak in peaks)
            lines.append(f"| {case['shape']['num_experts']} | {case['dtype']} | {case['mode']} | {ours} | {theirs} |")
    return "\n".join(lines)


def switch_table(result: dict[str, Any]) -> str:
    """Milliseconds by number of experts, a column per way."""
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    lines = [f"| experts | {' | '.join(ways)} |", "|--:|" + "--:|" * len(ways)]
    for count in dict.fromkeys(row["experts"] for row in result["rows"]):
        times = {row["way"]: row["median_ms"] for row in result["rows"] if row["experts"] == count}
        lines.append(f"| {count} | {' | '.join(f'{times[way]:.3g}' for way in ways)} |")
    return "\n".join(lines)


def source(result: dict[str, Any]) -> str:
    """Machine, versions, date and the command."""
    return f"{describe(result)}. To repeat it: `{result['command']}`"


def load(folder: Path, name: str) -> dict[str, Any]:
    """The result ``name``.json of a folder.

    Raises:
        ValueError: it is the result of something else.
    """
    return read_result(folder / f"{name}.json", name.split("_")[0])
