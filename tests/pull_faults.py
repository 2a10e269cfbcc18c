"""What a hub, a proxy or a network can do to one image on its way, for tests of pulling."""

import time

from hub import random_images

from guide_code.sitebuild.image_cache import cached_path
from guide_code.sitebuild.image_download import Patience

IMAGES = random_images(6, 3000)
SHORT = Patience(attempts=3, pause=0.01, longest_wait=2, connect=1, silence=0.3, total=1.0)
VICTIM = "figures/f002-wide-light.svg"


def contents(lock, cache):
    return {path: cached_path(cache, file).read_bytes() for path, file in lock.files.items()}


def once(fault):
    """The fault, the first time only."""
    left = [True]

    def act(handler, path):
        return path.endswith(VICTIM) and bool(left and left.pop()) and fault(handler) is not False

    return act


def always(fault):
    return lambda handler, path: path.endswith(VICTIM) and fault(handler) is not False


def corrupted(handler):
    data = bytearray(IMAGES[VICTIM])
    data[1500] ^= 1
    handler.send(bytes(data))


def html(handler):
    handler.send(b"<!DOCTYPE html><html>Please log in</html>", Content_Type="text/html")


def pointer(handler):
    handler.send(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3000\n")


def short(handler):
    handler.send(IMAGES[VICTIM][:1000])


def empty(handler):
    handler.send(b"")


def long(handler):
    handler.send(IMAGES[VICTIM] + b"more")


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(bytes(1 << 16))
    handler.close_connection = True


def dropped(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "3000")
    handler.end_headers()
    handler.wfile.write(IMAGES[VICTIM][:1234])
    handler.close_connection = True


def silent(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "3000")
    handler.end_headers()
    handler.wfile.write(IMAGES[VICTIM][:1234])
    handler.wfile.flush()
    time.sleep(0.5)
    handler.close_connection = True


def trickling(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "3000")
    handler.end_headers()
    for byte in IMAGES[VICTIM][:100]:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)
    handler.close_connection = True


def hung_up(handler):
    handler.close_connection = True


def nonsense(handler):
    handler.wfile.write(b"\0\1\2 not http\r\n\r\n")
    handler.close_connection = True


def wrong_part(handler):
    """Another part than was asked for."""
    handler.send(IMAGES[VICTIM][10:], 206, Content_Range="bytes 10-2999/3000")


def status(code, **headers):
    return lambda handler: handler.error(code, **headers)


def redirect(target):
    return lambda handler: handler.send(b"", 302, Location=target)
