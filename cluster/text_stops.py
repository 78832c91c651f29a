"""Finds stop strings in text that arrives in pieces, and says how much of its end could still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """All stop strings at once, a character at a time (Knuth, Morris and Pratt 1977, one automaton a string).

    The match that completes first wins; of those that complete at the same character, the longest. So the outcome
    does not depend on how the text is cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self.active = bool(self._stops)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that begin some stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """(position in `text` just after the match, the stop string), or None and all of the text is taken in."""
        for position, character in enumerate(text):
            matched = ""
            for i, stop in enumerate(self._stops):
                state = self._states[i]
                failure = self._failures[i]
                while state and stop[state] != character:
                    state = failure[state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    matched = max(matched, stop, key=len)
                    state = failure[state - 1]
                self._states[i] = state
            if matched:
                return position + 1, matched
        return None

    def reset(self) -> None:
        """Forget what was seen: a match cannot begin before this point."""
        self._states = [0] * len(self._stops)


def _failure_table(stop: str) -> list[int]:
    """Entry k: the length of the longest proper prefix of stop[:k + 1] that is also its end."""
    table = [0] * len(stop)
    length = 0
    for k in range(1, len(stop)):
        while length and stop[length] != stop[k]:
            length = table[length - 1]
        if stop[length] == stop[k]:
            length += 1
        table[k] = length
    return table
