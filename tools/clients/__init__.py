"""Tests of `kvant serve` with third-party clients. tools/server_clients.py runs them."""
