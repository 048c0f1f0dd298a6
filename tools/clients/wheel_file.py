"""Single files of a wheel, read by HTTP ranges: vLLM's wheel has 300 MB."""

import io
import os
import re
import urllib.parse
import urllib.request
import zipfile

from .serving import DOWNLOADS


class Remote(io.RawIOBase):
    """A file of a web server."""

    def __init__(self, url):
        self.url, self.position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as head:
            self.length = int(head.headers["content-length"])

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.position = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence] + offset
        return self.position

    def tell(self):
        return self.position

    def readinto(self, buffer):
        count = min(len(buffer), self.length - self.position)
        if count <= 0:
            return 0
        range = {"range": f"bytes={self.position}-{self.position + count - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=range)) as response:
            data = response.read(count)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def read(name, version, path):
    """The text of a file of a package's wheel for this kind of machine. Downloads it the first time."""
    kept = os.path.join(DOWNLOADS, f"{name}-{version}-{os.path.basename(path)}")
    if not os.path.exists(kept):
        index = f"https://pypi.org/simple/{name}/"
        with urllib.request.urlopen(index) as response:
            links = re.findall(r'href="([^"#]+)', response.read().decode())
        wheels = [link for link in links if f"/{name}-{version}-" in link and link.endswith(".whl")]
        link = next((link for link in wheels if "x86_64" in link), wheels[0])
        remote = Remote(urllib.parse.urljoin(index, link))
        with zipfile.ZipFile(io.BufferedReader(remote, 1 << 20)) as wheel:
            text = wheel.read(path).decode()
        with open(kept, "w") as file:
            file.write(text)
    with open(kept) as file:
        return file.read()
