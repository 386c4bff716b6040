"""A child process that does as its jobs say: a word, or a word and what to answer."""

import os
import time

from tvmconv.measuring.child import Last


def main(connection):
    connection.send(connection.recv())  # None: it is ready; a text: it refuses
    while True:
        word, *rest = connection.recv()
        if word == "end":
            os._exit(7)
        if word == "hang":
            time.sleep(1000)
        connection.send(Last(rest) if word == "last" else rest)
