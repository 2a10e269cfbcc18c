import json

import pytest
import torch
from safetensors.torch import save_file

from guide_code.conversion.reader import INDEX, SINGLE, FolderSource, MemorySource, shorten

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4).to(torch.bfloat16), "c": torch.ones(0, 3)}


def shard(folder, files, listed=None):
    """Files by name, each with some of TENSORS, and an index of ``listed`` (by default what is true)."""
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    listed = listed or {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def test_one_file(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    source = FolderSource(tmp_path)
    assert {name: meta.shape for name, meta in source.tensors.items()} == {"a": (2, 3), "b": (4,), "c": (0, 3)}
    assert source.tensors["b"].dtype == torch.bfloat16 and source.files == [tmp_path / SINGLE]
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name), tensor)


def test_shards(tmp_path):
    shard(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b", "c"]})
    source = FolderSource(tmp_path)
    assert source.tensors.keys() == TENSORS.keys() and len(source.files) == 2
    assert torch.equal(source.read("b"), TENSORS["b"]) and torch.equal(source.read("a"), TENSORS["a"])


def test_a_missing_shard_is_named(tmp_path):
    """known_failures C-04."""
    shard(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b"]})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"two\.safetensors is missing: the checkpoint is incomplete"):
        FolderSource(tmp_path)


@pytest.mark.parametrize("kept", [4, 20, -1])
def test_a_truncated_file_is_named(tmp_path, kept):
    shard(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b"]})
    path = tmp_path / "one.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"one\.safetensors is truncated or damaged"):
        FolderSource(tmp_path)


def test_an_index_that_lies_is_refused(tmp_path):
    files = {"one.safetensors": ["a"], "two.safetensors": ["b"]}
    shard(tmp_path, files, {"a": "two.safetensors", "b": "two.safetensors", "z": "one.safetensors"})
    with pytest.raises(ValueError, match=r"not where the index says \[a, z\]"):
        FolderSource(tmp_path)
    shard(tmp_path, files | {"one.safetensors": ["a", "c"]}, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(ValueError, match=r"in a file but not in the index \[c\]"):
        FolderSource(tmp_path)
    shard(tmp_path, files | {"one.safetensors": ["a", "b"]})
    with pytest.raises(ValueError, match=r"b is in both one\.safetensors and two\.safetensors"):
        FolderSource(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ValueError, match="points outside its folder"):
        FolderSource(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is missing or damaged"):
        FolderSource(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        FolderSource(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_refused_with_the_reason_and_never_opened(tmp_path, name):
    (tmp_path / name).write_bytes(b"not even a pickle")
    with pytest.raises(ValueError, match=rf"holds pickles only \(\[{name}\]\): reading one can run any code"):
        FolderSource(tmp_path)
    save_file(TENSORS, tmp_path / SINGLE)
    assert FolderSource(tmp_path).tensors.keys() == TENSORS.keys(), "beside safetensors they do not matter"


def test_nothing_to_read(tmp_path):
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        FolderSource(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        FolderSource(tmp_path / "nowhere")


def test_a_state_dict_is_a_source_that_copies_nothing():
    weight = torch.nn.Parameter(torch.randn(2, 2))
    source = MemorySource({"w": weight})
    assert source.read("w").data_ptr() == weight.data_ptr() and not source.read("w").requires_grad
    assert source.tensors["w"].shape == (2, 2)


def test_shorten():
    assert shorten(["a", "b"]) == "[a, b]"
    assert shorten([str(i) for i in range(10)], most=2) == "[0, 1 and 8 more]"
