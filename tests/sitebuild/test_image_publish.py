"""Publishing to a stand-in hub through its real client: one commit, then the lock, or neither."""

import json
import shutil
import subprocess
import threading

import pytest
from bs4 import BeautifulSoup
from hub import STRANGER, WRITER, Dataset, sha256
from pull_faults import SHORT, contents
from typer.testing import CliRunner

from guide_code.images_cli import app
from guide_code.sitebuild import image_publish
from guide_code.sitebuild.build import build_site
from guide_code.sitebuild.image_cache import CACHE
from guide_code.sitebuild.image_lock import LOCK_FILE, Lock, read_lock, write_lock
from guide_code.sitebuild.image_publish import PublishError, publish
from guide_code.sitebuild.image_pull import pull

REPO = "owner/images"
FIGURE = "figures/dense_vs_moe-wide-light.svg"


@pytest.fixture
def project(drawn_project):
    return drawn_project


def send(project, **options):
    return publish(project, REPO, **{"token": WRITER, "say": lambda line: None} | options)


def commits(hub):
    return [r for r in hub.requests if r.method == "POST" and "/commit/" in r.path]


def command(project, *words, **environment):
    return CliRunner(env=environment).invoke(app, [words[0], "--root", str(project), *words[1:]])


def change(project):
    """Another drawing of the figure, as after a change in its code."""
    (file,) = (project / ".cache" / "figures").glob("*/dense_vs_moe-wide-light.svg")
    file.write_text(file.read_text() + "<!-- changed -->\n")
    return file


# The client sends large files with an argument that its own HTTP library has deprecated.
LARGE = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@LARGE
def test_large_files_go_and_come_by_the_other_host(hub, project, tmp_path):
    hub.large = (".svg",)
    lock = send(project)
    assert pull(lock, tmp_path / "cache", token="", patience=SHORT).failures == {}
    assert {sha256(data) for data in contents(lock, tmp_path / "cache").values()} == set(hub.objects)
    assert len([request for request in hub.requests if request.where == "cdn"]) == len(lock.files)


def test_from_publishing_to_the_page_of_a_fresh_clone(hub, project, tmp_path):
    lock = send(project)
    assert read_lock(project) == lock and len(commits(hub)) == 1
    (project / ".gitignore").write_text(".cache/\nsite/\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@example.org commit -qm lock"):
        subprocess.run(["git", "-C", project, *words.split()], check=True, timeout=60)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", project, clone], check=True, timeout=60)
    assert not list(clone.rglob("dense_vs_moe*.svg")), "no image is in git"
    shutil.copytree(project / ".cache" / "notebooks", clone / ".cache" / "notebooks")

    lines = []
    site = build_site(clone, say=lines.append)
    assert f"images: {len(lock.files)} from {REPO}" in "\n".join(lines) and "drawing" not in "\n".join(lines)
    page = BeautifulSoup((site / "index.html").read_text(), "html.parser")
    image = page.select_one("figure.guide-figure .only-light img")
    locked = lock.files[FIGURE]
    assert sha256((site / str(image["src"])).read_bytes()) == locked.sha256
    assert (image["width"], image["height"], image["alt"]) == (str(locked.width), str(locked.height), locked.alt)
    assert not page.select(".guide-drawn"), "these are the published images, not drawn ones"

    asked = len(hub.requests)
    build_site(clone, say=lambda line: None)
    assert len(hub.requests) == asked, "a second build asks for nothing"


def test_the_lock_tells_all_about_each_file(hub, project):
    file = send(project).files[FIGURE]
    tree = hub.datasets[REPO].tree("main")
    assert (file.sha256, file.size) == (sha256(tree[FIGURE]), len(tree[FIGURE]))
    assert file.license == "Apache-2.0" and file.drawn_by == "guide_code.figures.dense_vs_moe"
    assert file.width > 500 and file.height > 100 and "expert" in file.alt.lower()
    card = tree["README.md"].decode()
    assert "license: apache-2.0" in card and f"]({FIGURE})" in card and "guide_code.figures.dense_vs_moe" in card


def test_only_what_has_changed_is_sent(hub, project):
    first = send(project)
    assert send(project) == first and len(commits(hub)) == 1, "nothing changed: no commit"
    change(project)
    sent = []
    hub.on_commit = lambda handler: sent.extend(json.loads(line) for line in handler.body.splitlines())
    second = send(project)
    assert [line["value"]["path"] for line in sent if line["key"] == "file"] == [FIGURE]
    assert sent[0]["value"]["parentCommit"] == first.commit != second.commit
    assert contents_at(hub, second) == {path: file.sha256 for path, file in second.files.items()}


def contents_at(hub, lock):
    tree = hub.datasets[REPO].tree(lock.commit)
    return {path: sha256(data) for path, data in tree.items() if path.startswith("figures/")}


def test_a_figure_that_is_gone_goes_from_the_dataset_but_not_from_its_history(hub, project, tmp_path):
    first = send(project)
    hub.datasets[REPO].commit(hub.datasets[REPO].tree("main") | {"figures/old-wide-light.svg": b"old"})
    second = send(project, onto=hub.datasets[REPO].head)
    assert "figures/old-wide-light.svg" not in hub.datasets[REPO].tree("main")
    assert second.files == first.files and second.commit != first.commit
    assert pull(first, tmp_path / "cache", token="", patience=SHORT).failures == {}, "old checkouts keep their images"


def test_a_dry_run_shows_the_difference_and_sends_nothing(hub, project):
    before = (project / LOCK_FILE).exists()
    result = command(project, "publish", "--dry-run")
    assert result.exit_code == 0 and f"+ {FIGURE}" in result.output and "4 files differ" in result.output
    assert hub.requests == [] and (project / LOCK_FILE).exists() == before
    send(project)
    change(project)
    asked, lock = len(hub.requests), (project / LOCK_FILE).read_bytes()
    result = command(project, "publish", "--dry-run", "--repo", REPO)
    assert f"~ {FIGURE}" in result.output and "1 files differ" in result.output
    assert len(hub.requests) == asked and (project / LOCK_FILE).read_bytes() == lock


def refused(hub, project, words, **options):
    """Publishing fails with these words, and both the lock and the dataset stay as they are."""
    lock = (project / LOCK_FILE).read_bytes()
    head = hub.datasets[REPO].head
    with pytest.raises(PublishError, match=words):
        send(project, **options)
    assert (project / LOCK_FILE).read_bytes() == lock and hub.datasets[REPO].head == head


@pytest.mark.fault
def test_without_a_token_nothing_is_asked(hub, project):
    result = command(project, "publish", "--repo", REPO)
    assert result.exit_code == 1 and "no token: make one" in result.output
    assert hub.requests == [] and not (project / LOCK_FILE).exists()


@pytest.mark.fault
@pytest.mark.parametrize(("token", "words"), [(STRANGER, "no right to write to owner/images"), ("hf_stale", "401")])
@pytest.mark.parametrize("there", [True, False])
def test_without_the_right_nothing_is_locked(hub, project, token, words, there):
    if there:
        send(project)
        change(project)
        refused(hub, project, words, token=token)
    else:
        with pytest.raises(PublishError, match=words):
            send(project, token=token)
        assert REPO not in hub.datasets and not (project / LOCK_FILE).exists()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("status", "words"),
    [(409, "someone else is publishing"), (412, "someone else has just"), (429, "five minutes"), (500, "try again")],
)
def test_a_commit_that_the_hub_refuses_locks_nothing(hub, project, status, words):
    send(project)
    change(project)
    hub.on_commit = lambda handler: handler.error(status) is None
    refused(hub, project, words)
    hub.on_commit = lambda handler: False
    send(project)


def hang_up(handler):
    handler.close_connection = True
    return True


@pytest.mark.fault
def test_a_network_that_goes_before_the_commit_costs_nothing(hub, project):
    send(project)
    change(project)
    hub.on_commit = hang_up
    refused(hub, project, "cannot be reached .* is unchanged")
    hub.on_commit = lambda handler: False
    assert contents_at(hub, send(project))


@LARGE
@pytest.mark.fault
def test_an_upload_of_a_large_file_that_fails_is_said(hub, project):
    send(project)
    change(project)
    hub.large = (".svg",)
    hub.fault = lambda handler, path: handler.error(403) is None
    refused(hub, project, "HTTP 403 .* is unchanged")
    hub.fault = lambda handler, path: False
    send(project)


@pytest.mark.fault
def test_a_commit_whose_answer_is_lost_is_found_the_next_time(hub, project):
    first = send(project)
    change(project)
    hub.after_commit = hang_up
    with pytest.raises(PublishError, match="cannot be reached"):
        send(project)
    assert read_lock(project) == first and hub.datasets[REPO].head != first.commit
    hub.after_commit = lambda handler: False
    made = len(commits(hub))
    second = send(project)
    assert len(commits(hub)) == made and second.commit == hub.datasets[REPO].head
    assert contents_at(hub, second) == {path: file.sha256 for path, file in second.files.items()}


@pytest.mark.fault
def test_no_network_at_all_is_said(hub, project):
    send(project)
    change(project)
    refused(hub, project, "cannot be reached", endpoint="http://127.0.0.1:9")


@pytest.mark.fault
def test_killed_before_the_lock_is_written_the_next_run_writes_it(hub, project, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(image_publish, "write_lock", killed)
        with pytest.raises(KeyboardInterrupt):
            send(project)
    write_lock(project, Lock(REPO, hub.datasets[REPO].commits[0][0], {}))
    lock = send(project)
    assert lock.commit == hub.datasets[REPO].head and len(commits(hub)) == 1


@pytest.mark.fault
def test_of_two_publishers_at_once_one_wins_and_the_other_is_told(hub, project, tmp_path):
    """Both see the same head, both send: the hub takes the first commit, and the second changes nothing."""
    first = send(project)
    shutil.copytree(project, tmp_path / "other")
    both = threading.Barrier(2, timeout=20)
    hub.on_commit = lambda handler: both.wait() > 1
    outcomes = {}

    def run(root, addition):
        file = change(root)
        file.write_text(file.read_text() + addition)
        try:
            outcomes[root] = send(root)
        except PublishError as error:
            outcomes[root] = error

    threads = [
        threading.Thread(target=run, args=(root, f"<!-- {i} -->"))
        for i, root in enumerate((project, tmp_path / "other"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [root for root, outcome in outcomes.items() if isinstance(outcome, Lock)]
    (loser,) = outcomes.keys() - {winner}
    assert "someone else has just published" in str(outcomes[loser]) and read_lock(loser) == first
    assert read_lock(winner).commit == hub.datasets[REPO].head and len(hub.datasets[REPO].commits) == 3
    assert contents_at(hub, read_lock(winner)) == {p: f.sha256 for p, f in read_lock(winner).files.items()}


@pytest.mark.fault
def test_a_dataset_that_has_moved_is_not_overwritten_unless_told(hub, project):
    send(project)
    change(project)
    head = hub.datasets[REPO].commit(hub.datasets[REPO].tree("main") | {FIGURE: b"theirs"})
    refused(hub, project, f"has moved .* --onto {head}")
    assert send(project, onto=head).commit == hub.datasets[REPO].head


@pytest.mark.fault
def test_images_that_no_lock_names_are_not_overwritten(hub, project):
    hub.datasets[REPO] = Dataset()
    hub.datasets[REPO].commit({FIGURE: b"theirs"})
    with pytest.raises(PublishError, match="already holds images"):
        send(project)
    assert not (project / LOCK_FILE).exists()


@pytest.mark.fault
def test_a_hub_that_keeps_other_bytes_is_not_locked(hub, project):
    send(project)
    change(project)

    def damage(handler):
        hub.datasets[REPO].tree("main")[FIGURE] = b"damaged"
        return False

    hub.after_commit = damage
    lock = (project / LOCK_FILE).read_bytes()
    with pytest.raises(PublishError, match=f"other bytes than were sent for {FIGURE}"):
        send(project)
    assert (project / LOCK_FILE).read_bytes() == lock


def test_the_commands_work_together(hub, project):
    """publish, status, pull, verify, gc: as a maintainer types them."""
    done = command(project, "publish", "--repo", REPO, HF_TOKEN=WRITER)
    assert done.exit_code == 0 and "4 files. Now commit docs/data/images.lock" in done.output, done.output
    assert "cache: 0 of 4 files" in command(project, "status").output
    pulled = command(project, "pull")
    assert pulled.exit_code == 0 and "4 images are whole, 4 of them new" in pulled.output
    assert "4 images are the locked ones" in command(project, "verify", "--hub").output
    lock = read_lock(project)
    assert set(contents(lock, project / CACHE)) == set(lock.files)

    stray = project / CACHE / f"{'0' * 64}.svg"
    stray.write_bytes(b"x")
    assert "1 files, 0.0 MB would go" in command(project, "gc", "--dry-run").output and stray.exists()
    assert "1 files, 0.0 MB deleted" in command(project, "gc").output and not stray.exists()

    hub.datasets[REPO].commit(dict(hub.datasets[REPO].tree("main")) | {FIGURE: b"moved"})
    moved = command(project, "verify", "--hub")
    assert moved.exit_code == 1 and "has moved on" in moved.output
    next((project / CACHE).glob("*.svg")).write_bytes(b"tampered")
    broken = command(project, "verify")
    assert broken.exit_code == 1 and "its copy in the cache had wrong bytes" in broken.output


def test_without_a_dataset_the_commands_say_so(project):
    write_lock(project, Lock())
    assert "dataset: none yet" in command(project, "status").output
    pulled = command(project, "pull")
    assert pulled.exit_code == 1 and "names no dataset yet" in pulled.output
    assert "no dataset is chosen" in command(project, "publish").output
