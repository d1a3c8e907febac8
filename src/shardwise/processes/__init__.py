"""Processes that form one system: joining it, leaving it, and fresh ones on this machine."""

from shardwise.processes.fresh import command, run, start
from shardwise.processes.system import join, leave

__all__ = ["command", "join", "leave", "run", "start"]
