"""Launchers: a command of shardwise as several processes, on one machine or on many."""

from shardwise.run.launch.command import main

__all__ = ["main"]
