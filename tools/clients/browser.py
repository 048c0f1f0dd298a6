"""Headless Chromium, controlled by its debugging protocol."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request

KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


def chromium():
    names = ["chromium", "chromium-browser", "google-chrome"]
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    """One window. `answers` are texts that replace the server's answers to the next conversations."""

    def __init__(self, folder):
        import websocket

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,800"]
        command = [chromium(), *options, "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}"]
        self.process = subprocess.Popen([*command, "about:blank"], stderr=subprocess.PIPE, text=True)
        found = None
        while not found:
            line = self.process.stderr.readline()
            assert line, "Chromium has ended"
            found = re.search(r"DevTools listening on ws://([^/]+)/", line)
        with urllib.request.urlopen(f"http://{found.group(1)}/json/list") as response:
            page = next(target for target in json.load(response) if target["type"] == "page")
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.next = 0
        self.answers, self.paused = [], []
        # Records bodies of conversations, addresses of all requests, and errors of scripts and of the page's policy.
        self.bodies, self.addresses, self.problems = [], [], []
        for domain in ["Page", "Network", "Runtime", "Log"]:
            self.call(f"{domain}.enable")
        self.call("Fetch.enable", patterns=[{"urlPattern": "*/v1/chat/completions"}])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def call(self, method, **params):
        self.next += 1
        number = self.next
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                break
            self.note(message.get("method"), message.get("params"))
        assert "error" not in message, message
        while self.paused:
            self.fulfil(self.paused.pop(0))
        return message["result"]

    def note(self, event, params):
        if event == "Fetch.requestPaused":
            self.paused.append(params)
        elif event == "Network.requestWillBeSent":
            self.addresses.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and params["entry"]["source"] not in ("network", "intervention"):
            self.problems.append(params["entry"]["text"])

    def fulfil(self, request):
        self.bodies.append(json.loads(request["request"]["postData"]))
        if not self.answers:
            self.call("Fetch.continueRequest", requestId=request["requestId"])
            return
        events = [{"choices": [{"delta": delta}]} for delta in deltas(self.answers.pop(0))]
        events.append({"choices": [], "usage": {"completion_tokens": len(events)}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        headers = [{"name": "content-type", "value": "text/event-stream"}]
        body = base64.b64encode(text.encode()).decode()
        self.call("Fetch.fulfillRequest", requestId=request["requestId"], responseCode=200, responseHeaders=headers, body=body)

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in result, (expression, result)
        return result["result"].get("value")

    def until(self, expression, limit=60):
        deadline = time.monotonic() + limit
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.02)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def look(self, width, height, scheme):
        """Sets the size of the window, and whether the system prefers light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def key(self, key, text=None):
        key = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def type(self, text):
        """Types into the focused element."""
        self.call("Input.insertText", text=text)

    def click(self, selector):
        """Clicks the middle of an element, which must be visible and on top."""
        place = self.value(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "nearest"}});
            const box = node.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            const top = document.elementFromPoint(x, y);
            return node.contains(top) ? [x, y] : String(top?.outerHTML);
        }})()""")
        assert isinstance(place, list), f"{selector} is under {place}"
        for kind in ["mousePressed", "mouseReleased"]:
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def picture(self, path):
        picture = self.call("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture["data"]))


def deltas(answer):
    """An answer in pieces, as a server streams it: a text, or (reasoning, text)."""
    thoughts, text = answer if isinstance(answer, tuple) else ("", answer)
    pieces = lambda text: [text[i : i + 7] for i in range(0, len(text), 7)]
    return [{"reasoning_content": piece} for piece in pieces(thoughts)] + [{"content": piece} for piece in pieces(text)]
