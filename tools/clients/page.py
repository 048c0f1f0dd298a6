"""The page in headless Chromium, at three widths, light and dark: a conversation with code, stop, edit, regenerate, reload;
hostile answers; accessibility by axe-core. `KVANT_SCREENSHOTS=FOLDER` saves pictures as PNG.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time

from .browser import Browser, chromium
from .serving import DOWNLOADS, Server

SIZES = [(360, 740), (800, 900), (1280, 800)]
AXE = "axe-core-4.14.1"
CODE = """A `Vec` doubles its capacity:

```rust
let mut v: Vec<u32> = Vec::with_capacity(4); // a line that is much longer than a narrow screen has room for
v.extend([1, 2, 3, 4, 5]);
```

| call | **cost** |
|:-----|---------:|
| push | 1, amortised |

1. one
2. two [link](https://example.com/a?b=1&c=2)
   - nested <b>bold</b> &amp; ![a picture](https://example.com/p.png)
"""
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">
<iframe src="https://evil.example/"></iframe><svg onload="window.hacked = 3"></svg>

[a](javascript:window.hacked=4) [b](JaVaScRiPt:window.hacked=5) [c](data:text/html,<script>1</script>) [d](vbscript:x)
[e](&#106;avascript:window.hacked=6) [f](java\tscript:x) <javascript:window.hacked=7> [g](//evil.example/) [h](file:///etc/passwd)
![i](https://evil.example/i.png) ![j](javascript:window.hacked=8) [k]: javascript:window.hacked=9

[k] [l](https://example.com/" onmouseover="window.hacked=10) <a href="https://evil.example/" onclick="window.hacked=11">m</a>

```"><img src=x onerror=window.hacked=12>
</code></pre><script>window.hacked = 13</script>
```

| <img src=x onerror=window.hacked=14> | b |
|:--|--|
| </td><script>window.hacked = 15</script> | <style>*{background:url(https://evil.example/s)}</style> |
"""
LAST = "document.querySelector('#log article:last-child')"
IDLE = "document.querySelector('#cancel').disabled && !document.querySelector('#send').hidden"


def axe():
    """The script of axe-core, or None if it cannot be downloaded."""
    archive = os.path.join(DOWNLOADS, f"{AXE}.tgz")
    if not os.path.exists(archive):
        name, version = AXE.rsplit("-", 1)
        os.makedirs(DOWNLOADS, exist_ok=True)
        npm = shutil.which("npm")
        if npm is None or subprocess.run([npm, "pack", "--silent", f"{name}@{version}"], cwd=DOWNLOADS, stdout=subprocess.DEVNULL).returncode:
            return None
    with tarfile.open(archive) as tar:
        return tar.extractfile("package/axe.min.js").read().decode()


class Page:
    """The actions of a user."""

    def __init__(self, browser, url, axe):
        self.browser, self.url, self.axe = browser, url, axe
        self.pictures = os.environ.get("KVANT_SCREENSHOTS")
        self.look = "page"

    def start(self):
        """Opens the page with empty browser storage."""
        browser = self.browser
        browser.open(self.url + "/health")
        browser.value("localStorage.clear(), sessionStorage.clear()")
        browser.open(self.url + "/")
        browser.until("document.querySelectorAll('#examples button').length > 0")
        browser.problems.clear()

    def set(self, **values):
        for name, value in values.items():
            field = f"document.querySelector('#{name}')"
            self.browser.value(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('change'))")

    def ask(self, text, *answers):
        """Types a message and sends it with the keyboard alone: the field has the focus."""
        # The page has loaded the model's name.
        self.browser.until("document.querySelector('#examples button') !== null")
        self.browser.answers += answers
        assert self.browser.value("document.activeElement.id") == "input"
        self.browser.type(text)
        self.browser.key("Enter", "\r")
        if answers:
            self.ended()

    def ended(self):
        self.browser.until(IDLE)

    def roles(self):
        return self.browser.value("[...document.querySelectorAll('#log article')].map(one => one.className).join(' ')")

    def text(self, selector=".body"):
        return self.browser.value(f"{LAST}.querySelector('{selector}').innerText")

    def check(self, state):
        """Checks that nothing is wider than the window, nothing has failed, and axe finds nothing serious. Saves a
        picture."""
        browser = self.browser
        if self.pictures:
            browser.picture(os.path.join(self.pictures, f"{self.look}-{state}.png"))
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), f"{self.look}, {state}: too wide"
        assert browser.problems == [], browser.problems
        if self.axe:
            if not browser.value("'axe' in window"):
                browser.value(self.axe)
            found = browser.value("axe.run({resultTypes: ['violations']}).then(result => result.violations.map(one => "
                                  "[one.impact, one.id, one.nodes.map(node => node.html + node.failureSummary)]))")
            serious = [one for one in found if one[0] in ("serious", "critical")]
            assert serious == [], f"{self.look}, {state}: {serious}"
            browser.problems.clear()


def streams(page, server):
    """Answers of the model: the text grows, Escape stops it, and the status line shows the server."""
    browser = page.browser
    page.start()
    page.set(seed="7", max_tokens="160")
    page.ask("How does a Vec grow?")
    browser.until("!document.querySelector('#cancel').disabled")
    lengths = set()
    while not browser.value(IDLE):
        lengths.add(browser.value(f"{LAST}.innerText.length"))
    assert len(lengths) > 5, f"the answer came in {len(lengths)} pieces"
    assert "160 tokens" in page.text(".actions") and "limit" in page.text(".actions"), page.text(".actions")
    # A conversation is sent as a whole, with the settings.
    page.set(max_tokens="4000")
    page.ask("And a HashMap?")
    browser.until(f"{LAST}.innerText.length > 60")
    body = browser.bodies[-1]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["seed"] == 7 and body["max_tokens"] == 4000 and "temperature" not in body, body
    browser.until("document.querySelector('#running').textContent === '1'")
    browser.until("parseFloat(document.querySelector('#pages-text').textContent) > 0")
    browser.until("parseFloat(document.querySelector('#speed').textContent) > 0")
    before = server.metrics()["request_success_total.abort"]
    browser.key("Escape")
    page.ended()
    assert server.settled()["request_success_total.abort"] == before + 1
    length = browser.value(f"{LAST}.innerText.length")
    time.sleep(0.3)
    assert browser.value(f"{LAST}.innerText.length") == length, "a stopped answer grows"
    assert "stopped" in page.text(".actions")
    # The input field has the focus again. The status line shows cached tokens of the conversation.
    assert browser.value("document.activeElement.id") == "input"
    browser.until("document.querySelector('#running').textContent === '0'")
    assert browser.value("document.querySelector('#hits').textContent").endswith("%")
    assert browser.value("document.querySelectorAll('.error:not([hidden])').length") == 0


def conversation(page, width, height, scheme):
    browser = page.browser
    page.look = f"{width}-{scheme}"
    browser.look(width, height, scheme)
    page.start()
    assert browser.value("document.querySelector('header').offsetHeight") < 60, "the header has several rows"
    assert browser.value("document.querySelector('#input').offsetWidth / innerWidth") > 0.45
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light"), back
    facts = browser.value("document.querySelector('#first').innerText")
    assert "rustdoc-11m" in facts and "8,192 tokens" in facts and "f16" in facts, facts
    page.check("first")

    # Markdown, with code that can be copied.
    page.ask("How does a Vec grow?", ("Let me think.\nOf capacity.", CODE))
    assert browser.value(f"{LAST}.querySelector('.thoughts div').textContent") == "Let me think.\nOf capacity."
    assert not browser.value(f"{LAST}.querySelector('.thoughts').open"), "thoughts are folded"
    code = browser.value(f"{LAST}.querySelector('pre code').textContent")
    assert code == CODE.split("```rust\n")[1].split("```")[0], code
    body = f"{LAST}.querySelector('.body')"
    assert browser.value(f"[...{body}.querySelectorAll('th, td')].map(cell => cell.textContent + cell.style.textAlign).join()") == (
        "callleft,costright,pushleft,1, amortisedright")
    assert browser.value(f"[...{body}.querySelectorAll('a')].map(link => link.href + link.rel + link.target).join()") == (
        "https://example.com/a?b=1&c=2noopener noreferrer_blank,https://example.com/p.pngnoopener noreferrer_blank")
    assert browser.value(f"{body}.querySelector('ol ul li').textContent") == "nested <b>bold</b> & image: a picture"
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.click("#log article:last-child .copy-code")
    browser.until(f"{LAST}.querySelector('.copy-code').textContent === 'Copied'")
    assert browser.value("navigator.clipboard.readText()") == code
    browser.click("#log article:last-child .actions button")
    browser.until(f"{LAST}.querySelector('.actions button').textContent === 'Copied'")
    assert browser.value("navigator.clipboard.readText()") == CODE
    page.check("code")
    # Pages of another machine have no `navigator.clipboard`.
    browser.value("window.clipboard = navigator.clipboard; Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})")
    browser.click("#log article:first-child .actions button")
    browser.until("document.querySelector('#log article:first-child .actions button').textContent === 'Copied'")
    assert browser.value("delete navigator.clipboard; navigator.clipboard.readText()") == "How does a Vec grow?"

    # Another answer replaces the last one.
    browser.answers.append("A second answer.")
    browser.click("#log article:last-child .actions button:nth-child(2)")
    browser.until(f"{LAST}.innerText.includes('A second answer.')")
    page.ended()
    assert page.roles() == "user assistant"
    assert [message["content"] for message in browser.bodies[-1]["messages"]] == ["How does a Vec grow?"]
    browser.value("document.querySelector('#input').focus()")
    page.ask("And a String?", "As a Vec of bytes.")

    # An edited question replaces all later messages.
    browser.click("#log article:first-child .actions button:nth-child(2)")
    assert browser.value("document.activeElement.getAttribute('aria-label')") == "Edit the message"
    page.check("edit")
    browser.value("document.activeElement.select()")
    browser.type("How does a VecDeque grow?")
    browser.answers.append("As a ring.")
    browser.key("Enter", "\r")
    browser.until(f"{LAST}.innerText.includes('As a ring.')")
    page.ended()
    assert page.roles() == "user assistant"
    assert [message["content"] for message in browser.bodies[-1]["messages"]] == ["How does a VecDeque grow?"]

    # A reload shows the conversation again, and the list opens earlier ones.
    browser.call("Page.reload")
    browser.until("document.readyState === 'complete' && document.querySelectorAll('#log article').length === 2")
    assert page.text() == "As a ring."
    narrow = width < 900
    if narrow:
        browser.click("#open-history")
    page.check("history")
    browser.click("#new")
    browser.until("document.querySelectorAll('#log article').length === 0 && !document.querySelector('#first').hidden")
    page.ask("Another", "Yes.")
    if narrow:
        browser.click("#open-history")
    titles = browser.value("[...document.querySelectorAll('#list .title')].map(one => one.textContent).join()")
    assert titles == "Another,How does a VecDeque grow?", titles
    browser.click("#list li:nth-child(2) .title")
    browser.until(f"{LAST}.innerText.includes('As a ring.')")
    if narrow:
        browser.click("#open-history")
    browser.click("#list li:nth-child(2) .delete")
    browser.until("document.querySelectorAll('#list li').length === 1")
    if narrow:
        # A click next to the list closes it.
        browser.call("Input.dispatchMouseEvent", type="mousePressed", x=width - 5, y=height / 2, button="left", clickCount=1)
        browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=width - 5, y=height / 2, button="left", clickCount=1)
        browser.until("!document.body.classList.contains('history-open')")
    browser.click("#open-settings")
    page.check("settings")
    browser.key("Escape")
    browser.until("!document.querySelector('#settings').open")


def presets(page):
    """A system prompt: selected, shown, sent, saved under a name, and kept after a reload."""
    browser = page.browser
    page.start()
    browser.click("#open-settings")
    page.set(preset="1")
    page.set(system="Answer as a pirate.")
    assert browser.value("document.querySelector('#preset').value") == ""
    browser.value("document.querySelector('#preset-name').value = 'Pirate'")
    browser.click("#preset-save")
    assert browser.value("document.querySelector('#preset').selectedOptions[0].textContent") == "Pirate"
    browser.key("Escape")
    browser.until("document.activeElement.id === 'input'")
    page.ask("Who are you?", "Arr.")
    assert browser.bodies[-1]["messages"][0] == {"role": "system", "content": "Answer as a pirate."}
    browser.call("Page.reload")
    browser.until("document.querySelector('#system-line')?.textContent.includes('pirate') && document.querySelectorAll('#log article').length === 2")
    browser.click("#open-settings")
    browser.click("#preset-delete")
    assert browser.value("document.querySelector('#preset').selectedOptions[0].textContent") == "other"
    browser.key("Escape")


def hostile(page):
    """An answer, reasoning or a title runs no script, loads nothing, and has only links to web pages."""
    browser = page.browser
    browser.look(1280, 800, "light")
    page.start()
    browser.addresses.clear()
    page.ask(HOSTILE.split("\n")[0], (HOSTILE, HOSTILE))
    for _ in range(2):
        browser.value("[...document.querySelectorAll('#log a, #log .thoughts summary')].forEach(node => node.dispatchEvent(new MouseEvent('mouseover')))")
        time.sleep(0.5)
        assert browser.value("typeof window.hacked") == "undefined"
        forbidden = "#log :is(script, img, iframe, svg, style, object, form, b), #list :is(script, img)"
        assert browser.value(f"document.querySelectorAll('{forbidden}').length") == 0
        links = browser.value("[...document.querySelectorAll('#log a')].map(link => link.getAttribute('href'))")
        assert links and all(link.startswith("https://") for link in links), links
        attributes = browser.value("[...document.querySelectorAll('#log *')].flatMap(node => node.getAttributeNames()).filter(name => name.startsWith('on'))")
        assert attributes == [], attributes
        assert all(address.startswith(page.url) for address in browser.addresses), browser.addresses
        assert browser.problems == [], browser.problems
        # From the history.
        browser.call("Page.reload")
        browser.until("document.querySelectorAll('#log article').length === 2")
    # The policy is a second defence: even the page's own scripts cannot parse text as nodes.
    assert browser.value("(() => { try { document.body.innerHTML = '<b>'; return 'made' } catch (error) { return error.name } })()") == "TypeError"
    assert len(browser.problems) == 1 and "TrustedHTML" in browser.problems.pop(), browser.problems
    # Deeply nested and long answers end in time.
    for text in ["> " * 5000 + "x", "- " * 3000 + "x", "[" * 20000, "*a " * 20000, "`" * 19999, "|" * 20000 + "\n" + "|-" * 2000]:
        browser.value("document.querySelector('#new').click()")
        browser.until("document.querySelectorAll('#log article').length === 0")
        started = time.monotonic()
        page.ask("deep", text)
        assert time.monotonic() - started < 20, f"{text[:10]}… takes {time.monotonic() - started:.0f} s"
        assert browser.problems == [], browser.problems


def bounded(page):
    """The history keeps the latest conversations, and can be deleted completely."""
    browser = page.browser
    page.start()
    browser.value("""for (let i = 0; i < 130; i++) {
        const messages = [{role: "user", content: "Question " + i}, {role: "assistant", content: "x".repeat(20000)}];
        localStorage.setItem("kvant.conversation.c" + i, JSON.stringify({id: "c" + i, at: i, mode: "chat", messages}));
    }
    localStorage.setItem("kvant.conversation.bad", '{"id": "bad", "messages": [3]}');
    localStorage.setItem("kvant.conversation.worse", 'no JSON')""")
    browser.call("Page.reload")
    browser.until("document.querySelectorAll('#list li').length === 130")
    page.ask("The newest", "Yes.")
    kept = browser.value("Object.keys(localStorage).filter(key => key.startsWith('kvant.conversation.c')).length")
    assert 90 <= kept < 100, kept
    assert browser.value("document.querySelector('#list .title').textContent") == "The newest"
    assert browser.value("localStorage.getItem('kvant.conversation.c129') !== null && localStorage.getItem('kvant.conversation.c0') === null")
    browser.click("#delete-all")
    assert browser.value("document.querySelectorAll('#list li').length") > 90, "one click deletes nothing"
    browser.click("#delete-all")
    browser.until("document.querySelectorAll('#list li').length === 0")
    assert browser.value("document.querySelectorAll('#log article').length") == 0


def failures(page):
    """An error is shown, the next request omits its question, and the answer can be retried."""
    browser = page.browser
    page.start()
    page.set(top_p="7")
    page.ask("Wrong")
    page.ended()
    assert "top_p" in page.text(".error"), page.text(".error")
    page.check("error")
    page.set(top_p="")
    page.ask("Right", "Yes.")
    assert [message["content"] for message in browser.bodies[-1]["messages"]] == ["Right"]


def keys(browser, kvant, script):
    """A server with keys: the page asks for one, and does not store it."""
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write("secret\n")
        file.flush()
        with Server(kvant, "--api-key-file", file.name) as server:
            browser.open(server.url + "/")
            browser.until("document.querySelector('#settings').open && document.activeElement.id === 'key'")
            browser.type("secret")
            browser.key("Enter", "\r")
            browser.until("!document.querySelector('#settings').open")
            browser.until("document.querySelectorAll('#examples button').length > 0")
            page = Page(browser, server.url, script)
            page.ask("How?")
            browser.until(f"{LAST}?.querySelector('.body').innerText.length > 20")
            browser.key("Escape")
            page.ended()
            stored = browser.value("JSON.stringify([{...localStorage}, {...sessionStorage}])")
            assert "secret" not in stored, stored


def texts(browser, kvant, script):
    """A model without a template continues texts."""
    with Server(kvant, template=None) as server:
        page = Page(browser, server.url, script)
        page.look = "text"
        page.start()
        page.set(max_tokens="20")
        assert "no chat template" in browser.value("document.querySelector('#facts').innerText")
        page.check("first")
        browser.click("#examples button")
        browser.until(f"{LAST}?.className === 'assistant' && {IDLE}")
        assert "20 tokens" in page.text(".actions"), page.text(".actions")


def several(browser, kvant, script):
    """Each name of the server can be selected, and is requested."""
    with Server(kvant, "--name", "one", "--name", "two") as server:
        page = Page(browser, server.url, script)
        page.look = "several"
        browser.look(360, 740, "light")
        page.start()
        page.set(models="two")
        assert browser.value("document.querySelector('#first-title').textContent") == "two"
        page.check("first")
        browser.value("document.querySelector('#input').focus()")
        page.ask("Who?", "Two.")
        assert browser.bodies[-1]["model"] == "two"
        assert browser.value(f"{LAST}.querySelector('h2').textContent") == "two"


def run(kvant):
    if chromium() is None:
        return "skipped: no Chromium (apt-get install chromium)"
    script = axe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(folder) as browser:
        with Server(kvant) as server:
            page = Page(browser, server.url, script)
            streams(page, server)
            for width, height in SIZES:
                for scheme in ["light", "dark"]:
                    conversation(page, width, height, scheme)
            page.look = "1280-light"
            browser.look(1280, 800, "light")
            for part in [presets, hostile, bounded, failures]:
                part(page)
        keys(browser, kvant, script)
        texts(browser, kvant, script)
        several(browser, kvant, script)
    return "conversations, history, hostile answers, keys" + ("" if script else "; skipped: axe-core cannot be downloaded")
