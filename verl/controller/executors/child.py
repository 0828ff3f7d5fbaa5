"""The life of a worker process: commands from a channel, one after the other, until it is shut."""

from __future__ import annotations

import logging
import os
import socket

from verl.common.collector import exit_without_collecting
from verl.controller.executors.channel import Channel
from verl.controller.executors.lifeline import die_with
from verl.controller.executors.memory import store
from verl.controller.rendezvous import leave
from verl.controller.worker import Worker


def main(channel_fd: int, lifeline_fd: int, parent: int) -> None:
    """A worker process that ``parent`` has started, with the two descriptors that it inherits."""
    for fd in (channel_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    die_with(lifeline_fd, parent)
    exit_without_collecting()
    if os.environ["RANK"] != "0":
        say_only_errors()
    serve(Channel(socket.socket(fileno=channel_fd)))


def say_only_errors() -> None:
    """For a process whose roles do what another rank's do, and would repeat its words."""
    logging.getLogger("verl").setLevel(logging.ERROR)


def serve(channel: Channel) -> None:
    """Carry out commands until the other side shuts the channel or is gone."""
    worker = Worker(store)
    while True:
        try:
            command = channel.receive()
        except (EOFError, OSError):
            break
        reply = worker.run(command)
        del command  # with it goes what it alone kept in memory
        try:
            channel.send(reply)
        except OSError:
            break
        del reply
    leave()
    channel.close()
