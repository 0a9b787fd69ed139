"""The one exception that a person is meant to read."""

from __future__ import annotations


class BadInput(ValueError):
    """Something that came from outside (a picture, a folder, a setting, a file) cannot be used.

    The message is one plain sentence: what was expected, what came, and which file or field it is about. It is shown
    as it stands in the node's error and on the terminal, so it never needs a traceback to be understood.
    """
