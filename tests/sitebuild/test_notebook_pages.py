import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from guide_code.sitebuild.notebook_pages import mount_notebook
from guide_code.sitebuild.notebooks import Executed

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAIAAAASFvFNAAAAEElEQVR4nGP4z8AARwzIHAB1ugX7tTCKOAAAAABJRU5ErkJggg=="


def mounted_page(tmp_path, outputs, **metadata):
    source = tmp_path / "demo.py"
    source.write_text("# %%\n")
    path = tmp_path / "demo-key.ipynb"
    notebook = new_notebook(cells=[new_code_cell("x", outputs=outputs, metadata=metadata)], metadata={"guide": {}})
    nbformat.write(notebook, path)
    mounted = mount_notebook(Executed(source, path, 1.0, ran=False), tmp_path / "workspace")
    assert path.read_bytes() and nbformat.read(path, 4).cells[0].outputs == notebook.cells[0].outputs, "left as it was"
    return mounted, nbformat.read(mounted[0].path, 4).cells[0].outputs


def test_what_is_printed_in_pieces_becomes_one_block(tmp_path):
    texts = [("stdout", "a\n"), ("stdout", "b\n"), ("stderr", "!"), ("stdout", "c\n")]
    _, outputs = mounted_page(tmp_path, [new_output("stream", name=name, text=text) for name, text in texts])
    assert [(output.name, output.text) for output in outputs] == [
        ("stdout", "a\nb\n"),
        ("stderr", "!"),
        ("stdout", "c\n"),
    ]


def test_an_image_becomes_a_file_with_its_own_size_and_a_name_from_its_bytes(tmp_path):
    image = new_output("display_data", data={"image/png": PIXEL, "text/plain": "<Figure>"})
    mounted, outputs = mounted_page(tmp_path, [image], alt='Three "pixels" & more')
    (file,) = [item for item in mounted if item.uri.endswith(".png")]
    assert file.uri.startswith("assets/notebooks/demo/1-") and file.path.read_bytes().startswith(b"\x89PNG")
    html = outputs[0].data["text/html"]
    assert f'src="../{file.uri}"' in html and 'width="3" height="2"' in html
    assert 'alt="Three &quot;pixels&quot; &amp; more"' in html


def test_an_svg_is_kept_as_it_is(tmp_path):
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="5" height="4"/>'
    mounted, _ = mounted_page(tmp_path, [new_output("display_data", data={"image/svg+xml": svg})], alt="A box")
    (file,) = [item for item in mounted if item.uri.endswith(".svg")]
    assert file.path.read_text() == svg
