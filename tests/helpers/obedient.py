"""A child process that does as its jobs say: a word, or a word and what to answer."""

import os
import time

from tvmconv.measure.workers.process import FinalMessage, iterate_messages


def main(connection):
    for message in iterate_messages(connection):
        if message is None or isinstance(message, str):
            connection.send(message)  # None: it is ready; a text: it refuses
            continue
        word, *rest = message
        if word == "end":
            os._exit(7)
        if word == "hang":
            time.sleep(1000)
        connection.send(FinalMessage(rest) if word == "last" else rest)
