"""Made-up prompts of a wanted length, reproducible from a seed: as token ids, or as words of about one token each."""

from __future__ import annotations

import numpy as np

from orcaserve.loadtest.workload import LoadRequest

# Frequent English words; with a space before it each is one token in the byte-pair vocabularies in use.
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new sound "
    "take only little work know place year live me back give most very after thing our just name good sentence man "
    "think say great where help through much before line right too mean old any same tell boy follow came want show "
    "also around form three small set put end does another well large must big even such because turn here why ask "
    "went men read need land different home us move try kind hand picture again change off play spell air away animal "
    "house point page letter mother answer found study still learn should America world high every near add food "
    "between own below country plant last school father keep tree never start city earth eye light thought head under "
    "story saw left few while along might close something seem next hard open example begin life always those both "
    "paper together got group often run important until children side feet car mile night walk white sea began grow"
)
WORDS = _TEXT.split()


class PromptMaker:
    """Prompts of one run. Ids lie in [first_id, last_id), clear of a vocabulary's special tokens."""

    def __init__(self, seed: int, first_id: int = 1000, last_id: int = 30000) -> None:
        self._seed = seed
        self._first_id = first_id
        self._last_id = last_id

    def ids(self, request: LoadRequest) -> list[int]:
        """The shared prefix's ids, then this request's own."""
        return self._prefix(request, self._first_id, self._last_id) + self._own(request, self._first_id, self._last_id)

    def text(self, request: LoadRequest) -> str:
        """The data set's text where there is one; otherwise one word for each wanted token."""
        if request.text:
            return request.text
        picks = self._prefix(request, 0, len(WORDS)) + self._own(request, 0, len(WORDS))
        return " ".join(WORDS[pick] for pick in picks)

    def _prefix(self, request: LoadRequest, low: int, high: int) -> list[int]:
        rng = np.random.default_rng((self._seed, 1, request.prefix))
        return rng.integers(low, high, size=request.prefix_tokens).tolist()

    def _own(self, request: LoadRequest, low: int, high: int) -> list[int]:
        rng = np.random.default_rng((self._seed, 2, request.index))
        return rng.integers(low, high, size=request.prompt_tokens - request.prefix_tokens).tolist()
