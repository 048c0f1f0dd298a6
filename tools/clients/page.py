"""The page in headless Chromium: it streams an answer, stops it, shows the strip, and works with the keyboard alone.

`KVANT_SCREENSHOT=FILE` saves a picture of it as PNG.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time

from .serving import Server


class Browser:
    """Chromium, by its debugging protocol."""

    def __init__(self, chromium, folder):
        import websocket

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,760"]
        command = [chromium, *options, "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}"]
        self.process = subprocess.Popen([*command, "about:blank"], stderr=subprocess.PIPE, text=True)
        found = None
        while not found:
            line = self.process.stderr.readline()
            assert line, "Chromium has ended"
            found = re.search(r"DevTools listening on ws://([^/]+)/", line)
        import urllib.request

        with urllib.request.urlopen(f"http://{found.group(1)}/json/list") as response:
            page = next(target for target in json.load(response) if target["type"] == "page")
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.next = 0

    def call(self, method, **params):
        self.next += 1
        self.socket.send(json.dumps({"id": self.next, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.next:
                assert "error" not in message, message
                return message["result"]

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression, limit=60):
        deadline = time.monotonic() + limit
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.02)

    def key(self, key, text=None):
        codes = {"Enter": 13, "Escape": 27}
        key = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def close(self):
        self.socket.close()
        self.process.kill()
        self.process.wait()


def ask(browser, text):
    """Types a message and sends it, with the keyboard alone: the field has the focus."""
    browser.call("Input.insertText", text=text)
    browser.key("Enter", "\r")


def run(kvant):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        return "skipped: no Chromium (apt-get install chromium)"
    answer = "[...document.querySelectorAll('#log article')].at(-1).innerText"
    with Server(kvant) as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(chromium, folder)
        try:
            browser.call("Page.enable")
            browser.call("Page.navigate", url=server.url)
            browser.until("document.querySelector('#model')?.textContent.includes('rustdoc-11m')")
            browser.value("document.querySelector('#seed').value = 7; document.querySelector('#max_tokens').value = 160")
            # A stream: the text grows.
            browser.value("document.querySelector('#input').focus()")
            ask(browser, "How does a Vec grow?")
            browser.until("!document.querySelector('#cancel').disabled")
            lengths = set()
            while not browser.value("document.querySelector('#cancel').disabled"):
                lengths.add(browser.value(f"{answer}.length"))
            assert len(lengths) > 5, f"the answer came in {len(lengths)} pieces"
            # Stop, by Escape: the server drops the request.
            browser.value("document.querySelector('#max_tokens').value = 4000")
            ask(browser, "And a HashMap?")
            browser.until("!document.querySelector('#cancel').disabled")
            browser.until(f"{answer}.length > 60")
            browser.until("document.querySelector('#running').textContent === '1'")
            browser.until("parseFloat(document.querySelector('#pages-text').textContent) > 0")
            browser.until("parseFloat(document.querySelector('#speed').textContent) > 0")
            if os.environ.get("KVANT_SCREENSHOT"):
                picture = browser.call("Page.captureScreenshot", format="png")
                with open(os.environ["KVANT_SCREENSHOT"], "wb") as file:
                    file.write(base64.b64decode(picture["data"]))
            browser.key("Escape")
            browser.until("document.querySelector('#cancel').disabled")
            metrics = server.settled()
            assert metrics["request_success_total.abort"] == 1
            length = browser.value(f"{answer}.length")
            time.sleep(0.3)
            assert browser.value(f"{answer}.length") == length, "a stopped answer grows"
            # The keyboard is back where a message is typed. The strip shows what was found of the conversation.
            assert browser.value("document.activeElement.id") == "input"
            browser.until("document.querySelector('#running').textContent === '0'")
            assert browser.value("document.querySelector('#hits').textContent").endswith("%")
            assert browser.value("document.querySelectorAll('.error').length") == 0
        finally:
            browser.close()
    return "the page streams, stops, and shows the strip"
