#!/usr/bin/env python3
"""Takes the documentation's pictures of the server's page, docs/images/server-page*.png, in headless Chromium.

    tools/page_pictures.py MODEL [--kvant target/release/kvant] [--kv tq5]

MODEL is a model that chats, such as a file of tools/released_models.py. Needs Chromium and the Python package
websocket-client.
"""

import argparse
import os
import tempfile

from clients.browser import Browser
from clients.page import IDLE, Page
from clients.serving import ROOT, Server

IMAGES = os.path.join(ROOT, "docs", "images")
QUESTIONS = ["What is the capital of France?", "Write a Python function that reverses a string."]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kvant", default=os.path.join(ROOT, "target", "release", "kvant"))
    parser.add_argument("--kv", default="tq5")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(folder) as browser:
        with Server(args.kvant, args.model, "--kv", args.kv, template=False) as server:
            page = Page(browser, server.url, None)
            browser.look(1000, 760, "light")
            page.start()
            browser.picture(os.path.join(IMAGES, "server-page-first.png"))
            page.set(temperature="0", max_tokens="300")
            for question in QUESTIONS:
                page.ask(question)
                browser.until("!document.querySelector('#cancel').disabled")
                browser.until(IDLE, limit=300)
            browser.until("document.querySelector('#running').textContent === '0'")
            browser.picture(os.path.join(IMAGES, "server-page.png"))
            browser.look(360, 740, "dark")
            browser.value("document.querySelector('#scroll').scrollTop = 1e9")
            browser.picture(os.path.join(IMAGES, "server-page-phone.png"))


if __name__ == "__main__":
    main()
