"""JavaScript clients with their default settings, by `js/defaults.mjs`: the newest versions from npm."""

import os
import shutil
import subprocess

from .serving import CALLS_TEMPLATE, DOWNLOADS, Server

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "js")
FOLDER = os.path.join(DOWNLOADS, "npm")


def install():
    """Whether the packages are installed. npm downloads them the first time."""
    os.makedirs(FOLDER, exist_ok=True)
    for name in os.listdir(SOURCE):
        shutil.copy(os.path.join(SOURCE, name), FOLDER)
    if os.path.exists(os.path.join(FOLDER, "node_modules", "zod")):
        return True
    # Some require a newer Node than npm's: it is one of the packages.
    npm = ["npm", "install", "--prefix", FOLDER, "--no-audit", "--no-fund", "--loglevel=error"]
    return shutil.which("npm") is not None and subprocess.run(npm).returncode == 0


def run(kvant):
    if not install():
        return "skipped: npm is missing, or its packages cannot be downloaded"
    node = os.path.join(FOLDER, "node_modules", "node", "bin", "node")
    node = node if os.path.exists(node) else "node"
    with Server(kvant, "--api-key", "secret", template=CALLS_TEMPLATE) as server:
        command = [node, os.path.join(FOLDER, "defaults.mjs"), server.url, "rustdoc-11m"]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert result.returncode == 0, f"these run: {result.stdout.splitlines()}"
    return f"{', '.join(result.stdout.splitlines())} run"
