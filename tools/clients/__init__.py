"""Checks of `kvant serve` with clients that kvant's authors did not write. tools/server_clients.py runs them."""
