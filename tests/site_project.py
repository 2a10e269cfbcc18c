"""A small project of its own with the real configuration, hooks and theme: fast to build, and safe to break."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]

NAV = """nav:
  - Home: index.md
  - learn/*.md
  - Tutorials:
      - tutorials/*
  - Reference:
      - reference/api/*

validation:"""

HELLO = """# ---
# jupyter:
#   kernelspec:
#     display_name: My laptop
#     language: python
#     name: my-laptop-env
#   guide:
#     timeout: 60
# ---

# %% [markdown]
# # Hello, notebook
#
# Inline $a_i^2$, and the link [home](../docs/index.md).
#
# $$\\sum_{i} w_i E_i(x)$$
#
# | expert | share |
# |--------|-------|
# | 0      | 25 %  |

# %%
from guide_code import demo

print("answer", demo.answer())
print("\\x1b[31mred\\x1b[0m and \\x1b[33myellow\\x1b[0m")

# %% [markdown]
# ## A picture of $x$

# %% alt="A straight line from the origin to (2, 2)"
import matplotlib.pyplot as plt

plt.plot([0, 1, 2])
plt.show()
"""

HOME = """# Home

Inline \\(b_j\\), and a display:

$$
y = \\sum_{i} w_i E_i(x)
$$

A [notebook](tutorials/hello.ipynb).

![One block beside the other](figure:dense_vs_moe)

| expert | share |
|--------|-------|
| 0      | 25 %  |

```python
x = 1  # a comment
```
"""

DEMO = '''"""A module of the small project."""


def answer() -> int:
    """The answer."""
    return 42
'''


def write_project(root: Path) -> Path:
    """Writes the small project into the empty folder `root`: one page, one notebook, one module, one figure."""
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    before, _, rest = configuration.partition("nav:\n")
    _, _, after = rest.partition("validation:")
    navigation = NAV.replace("  - learn/*.md\n", "")
    text = {
        "mkdocs.yml": before + navigation + after,
        "constraints.txt": "nothing==1\n",
        "docs/index.md": HOME,
        "notebooks/hello.py": HELLO,
        "guide_code/__init__.py": '"""A small package."""\n',
        "guide_code/demo.py": DEMO,
        "guide_code/figures/__init__.py": '"""Figures."""\n',
        "guide_code/sitebuild/__init__.py": '"""The hooks."""\n',
    }
    for name, content in text.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "assets", root / "docs" / "assets")
    for name in ("sitebuild/hooks.py", "figures/style.py", "figures/dense_vs_moe.py"):
        target = root / "guide_code" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "guide_code" / name, target)
    return root
