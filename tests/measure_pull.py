"""Measures `moe-guide images pull` against `snapshot_download` of `huggingface_hub`: `python tests/measure_pull.py`.

Both bring the same random images from a stand-in hub in a process of its own, in turns, each time into an empty folder;
ours with every sha256 compared. Then a warm pull, with the hub gone.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hub import random_images, sha256

from guide_code.sitebuild.image_lock import Lock, LockedFile
from guide_code.sitebuild.image_pull import pull

REPO = "owner/images"


def seconds(action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--size", type=int, default=100_000, help="bytes of each image")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    from huggingface_hub import snapshot_download

    words = [sys.executable, str(Path(__file__).with_name("hub.py")), str(options.count), str(options.size)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    hub = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert hub.stdin and hub.stdout
    try:
        endpoint, commit = hub.stdout.readline().split()
        about = (720, 400, "What it shows.", "Apache-2.0", "guide_code.figures.x")
        images = random_images(options.count, options.size)
        files = {path: LockedFile(path, sha256(data), len(data), *about) for path, data in images.items()}
        lock = Lock(REPO, commit, files)
        ours, theirs = [], []
        with tempfile.TemporaryDirectory() as name:
            for turn in range(options.turns):
                cache, other = Path(name, f"ours{turn}"), Path(name, f"theirs{turn}")

                def pull_all(cache=cache) -> None:
                    failures = pull(lock, cache, endpoint=endpoint, token="").failures
                    assert not failures, failures

                def snapshot(other=other) -> None:
                    snapshot_download(
                        REPO, repo_type="dataset", revision=commit, cache_dir=other, endpoint=endpoint, token=False
                    )

                for action, times in [(pull_all, ours), (snapshot, theirs)][:: 1 if turn % 2 else -1]:
                    times.append(seconds(action))
            hub.kill()
            hub.wait(10)
            warm = [seconds(pull_all) for _ in range(options.turns)]
    finally:
        hub.kill()
        hub.wait(10)
        hub.stdin.close()
        hub.stdout.close()
    mine, yours = statistics.median(ours), statistics.median(theirs)
    print(f"{options.count} files of {options.size} bytes, median of {options.turns} turns, {os.cpu_count()} cores")
    print(f"pull, verified:     {mine:.2f} s")
    print(f"snapshot_download:  {yours:.2f} s; pull has {yours / mine:.0%} of its speed")
    print(f"warm pull, no hub:  {statistics.median(warm):.3f} s, slowest {max(warm):.3f} s")


if __name__ == "__main__":
    main()
