"""What the README shows works as shown."""

import re
from pathlib import Path

from guide_code.experts.grouped import GroupedExperts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"MyExperts": GroupedExperts, "torch": __import__("torch")})
    assert capsys.readouterr().out == "torch.Size([2, 128, 512]) torch.Size([256, 8])\n"


def test_commands_and_files_exist():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z][\w-]*)", README)) - {"and"} <= targets
    table = [row.split("|")[2] for row in README.splitlines() if row.startswith("| ") and "`" in row.split("|")[2]]
    copied = {name for cell in table for name in re.findall(r"`([\w/]+\.py)`", cell)}
    assert len(copied) >= 6 and all((ROOT / "guide_code" / name).is_file() for name in copied)
