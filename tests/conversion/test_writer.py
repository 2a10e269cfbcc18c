import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from guide_code.conversion import writer
from guide_code.conversion.reader import INDEX, SINGLE, FolderSource
from guide_code.conversion.writer import Entry, new_folder, split, write_checkpoint, write_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def entries(tensors, made=None):
    def maker(name, tensor):
        def make():
            if made is not None:
                made.append(name)
            return tensor

        return make

    return [Entry(name, tuple(t.shape), t.dtype, maker(name, t)) for name, t in tensors.items()]


def test_what_is_written_is_what_safetensors_reads(tmp_path):
    tensors = {f"t{i}": (torch.randn(3, 4) * 9).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.ones(0, 2), "name of é": torch.randn(2).requires_grad_()}
    told = []
    digest = write_tensors(tmp_path / SINGLE, entries(tensors), told.append)
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.detach()), name
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses a file without it"
    assert digest == writer._digest(tmp_path / SINGLE)
    assert told == [t.numel() * t.element_size() for t in tensors.values()]


def test_views_are_written_as_what_they_show(tmp_path):
    """known_failures C-03. A transpose, a slice of a stack, an expanded row: each becomes a tensor of its own."""
    stack = torch.arange(24.0).view(2, 3, 4)
    tensors = {"transposed": stack[1].T, "slice": stack[0], "again": stack[0], "expanded": stack[0, :1].expand(5, 4)}
    write_tensors(tmp_path / SINGLE, entries(tensors), lambda count: None)
    found = load_file(tmp_path / SINGLE)
    assert all(torch.equal(found[name], tensor) and found[name].is_contiguous() for name, tensor in tensors.items())


def test_files_are_filled_up_to_the_limit_in_order():
    sizes = {f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate([4, 5, 1, 30, 2, 8])}
    names = [[entry.name for entry in part] for part in split(entries(sizes), 10).values()]
    assert names == [["t0", "t1", "t2"], ["t3"], ["t4", "t5"]]
    assert list(split(entries(sizes), 10)) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert list(split(entries(sizes), 50)) == [SINGLE]


def test_the_index_names_every_tensor_and_all_bytes(tmp_path):
    """known_failures C-03: total_size is the sum of bytes."""
    tensors = {f"t{i}": torch.randn(5, 3).to(DTYPES[i]) for i in range(4)}
    write_checkpoint(tmp_path, entries(tensors), max_bytes=60)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    source = FolderSource(tmp_path)
    assert source.tensors.keys() == index["weight_map"].keys() == tensors.keys() and len(source.files) == 3
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())
    assert {p.name for p in tmp_path.iterdir()} == {INDEX, *(f.name for f in source.files)}, "nothing left behind"


def test_a_killed_run_goes_on_after_the_files_that_it_finished(tmp_path):
    tensors = {f"t{i}": torch.randn(8) for i in range(4)}
    bad = [*entries(tensors)[:2], Entry("t2", (8,), torch.float32, lambda: 1 / 0)]
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path, bad + entries(tensors)[3:], max_bytes=32, plan="p")
    made, told = [], []
    kept = write_checkpoint(tmp_path, entries(tensors, made), max_bytes=32, plan="p", on_bytes=told.append)
    assert made == ["t2", "t3"] and kept == 64 and sum(told) == 128
    source = FolderSource(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("damage", ["other plan", "changed bytes", "cut", "gone", "damaged notes"])
def test_only_files_that_are_whole_and_of_the_same_plan_are_kept(tmp_path, damage):
    tensors = {f"t{i}": torch.randn(8) for i in range(3)}
    bad = [*entries(tensors)[:2], Entry("t2", (8,), torch.float32, lambda: 1 / 0)]
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path, bad, max_bytes=32, plan="p")
    first = tmp_path / "model-00001-of-00003.safetensors"
    data = first.read_bytes()
    if damage == "changed bytes":
        first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        first.write_bytes(data[:-1])
    elif damage == "gone":
        first.unlink()
    elif damage == "damaged notes":
        (tmp_path / "progress.json").write_text("{")
    made = []
    write_checkpoint(tmp_path, entries(tensors, made), max_bytes=32, plan="q" if damage == "other plan" else "p")
    wanted = ["t0", "t1", "t2"] if damage in ("other plan", "damaged notes") else ["t0", "t2"]
    assert made == wanted
    assert torch.equal(FolderSource(tmp_path).read("t0"), tensors["t0"])


def test_a_folder_gets_its_name_at_the_end(tmp_path):
    target = tmp_path / "deep/out"
    with new_folder(target) as work:
        (work / "x").write_text("1")
        assert not target.exists()
    assert (target / "x").read_text() == "1"
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def test_a_failure_leaves_nothing_or_what_the_next_run_goes_on_with(tmp_path):
    for keep in (False, True):
        with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out", keep=keep) as work:
            (work / "x").write_text("1")
            raise KeyboardInterrupt
        assert not (tmp_path / "out").exists()
        assert [p.name for p in tmp_path.iterdir()] == ([".writing-out"] if keep else [])
    with new_folder(tmp_path / "out", keep=True) as work:
        assert (work / "x").exists()


def test_a_destination_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as work:
        (work / "x").write_text("mine")
    with pytest.raises(ValueError, match="out exists already"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out/x").read_text() == "mine"
    with pytest.raises(ValueError, match="x exists already"), new_folder(tmp_path / "out/x"):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_two_writers_do_not_mix(tmp_path):
    code = (
        "import sys, pathlib; from guide_code.conversion.writer import new_folder\n"
        "try:\n"
        "    with new_folder(pathlib.Path(sys.argv[1])): pass\n"
        "except ValueError as error: print(error)"
    )
    with new_folder(tmp_path / "out") as work:
        (work / "x").write_text("1")
        command = [sys.executable, "-c", code, str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "another process is writing" in done.stdout, done.stderr
    assert (tmp_path / "out/x").exists()
