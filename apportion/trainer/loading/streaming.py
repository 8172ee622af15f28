"""Plans a stream of samples, whose lengths are not known in advance, from a buffer of the next ones.

iterable ──`buffer` samples──► Samples ──► PlannedLoader, one pass ──► the next buffer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.loading.samples import Samples

_PLACE = ("epoch", "buffer", "size")
_OWN = {"lengths", "masks", "sampler"}


class StreamedLoader:
    """Iterates over a stream in planned microbatches; every rank makes one with equal arguments, and reads all of it.

        for batch in ap.StreamedLoader(stream, cluster, model, tokens_per_rank, buffer=4096, too_long="drop"):

    stream: gives samples, as `Samples` has them, in one order on all ranks, anew for each pass; `set_epoch` is called
    where it has one, and `skip(n)`, which gives the stream without its first n samples, where a pass goes on. buffer:
    samples that are read, shuffled and planned at a time; its last microbatch may be a small one, so take many times
    what an iteration takes. mask, limit, too_long: as `Samples`. options: as `PlannedLoader`, but for what is of all
    samples: lengths, masks and sampler. Numbers of iterations and samples are those of a buffer.

    `state_dict` and `load_state_dict` are as those of `PlannedLoader`: a pass goes on behind the last batch that was
    given out. Raises ConfigError, as `Samples` and `PlannedLoader`, and ExecutionError where ranks read other lengths.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *job: Any,
        buffer: int,
        mask: Any = None,
        limit: int | None = None,
        too_long: str = "refuse",
        **options: Any,
    ) -> None:
        if unknown := sorted(_OWN & options.keys()):
            rule = "is of all samples, and a stream does not know them"
            raise ConfigError(unknown[0], options[unknown[0]], rule, "leave it out")
        if isinstance(stream, Iterator):
            rule = "gives one pass, and cannot begin anew"
            raise ConfigError("stream", type(stream).__name__, rule, "give what can be iterated anew")
        self._stream, self._size = stream, integer("buffer", buffer)
        self._samples = {"mask": mask, "limit": limit, "too_long": too_long}
        self._job, self._options = job, options
        self._epoch = self._number = 0  # of the next buffer
        self._loader: PlannedLoader | None = None
        self._inner: Mapping[str, Any] | None = None  # state of the loader of the next buffer
        self.dropped = self.cut = 0

    def set_epoch(self, epoch: int) -> None:
        """Another pass over the stream."""
        if integer("epoch", epoch, 0) != self._epoch:
            self._epoch, self._number, self._inner = epoch, 0, None

    def __iter__(self) -> Iterator[PlannedBatch]:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self._epoch)
        self._loader, samples = None, self._rest()
        while read := list(islice(samples, self._size)):
            self._loader = self._planned(Samples(read, **self._samples))
            if self._loader is not None:
                yield from self._loader
            self._number, self._inner = self._number + 1, None
        self._number = 0

    def _rest(self) -> Iterator[Any]:
        """The samples from the next buffer on."""
        behind = self._number * self._size
        if hasattr(self._stream, "skip"):
            return iter(self._stream.skip(behind))
        return islice(iter(self._stream), behind, None)

    def _planned(self, samples: Samples) -> PlannedLoader | None:
        """A pass over a buffer; None where all of it was dropped."""
        self.dropped, self.cut = self.dropped + samples.dropped, self.cut + samples.cut
        if not len(samples):
            return None
        loader = PlannedLoader(samples, *self._job, **self._options)
        loader.set_epoch(self._epoch)
        if self._inner is not None:
            loader.load_state_dict(self._inner)
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is: JSON-like data, equal on all ranks."""
        inner = self._inner if self._loader is None else self._loader.state_dict()
        return {"epoch": self._epoch, "buffer": self._number, "size": self._size, "loader": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on behind the last batch that was given out when the state was made. Raises ConfigError
        for a state of another buffer size; another dataset or job is one when the pass begins."""
        if not isinstance(state, Mapping) or {*_PLACE, "loader"} - state.keys():
            rule = "is not the state of a stream"
            raise ConfigError("state", state, rule, "give what `state_dict()` returned")
        if state["size"] != self._size:
            rule = f"the state was saved with another buffer: this loader has {self._size}"
            raise ConfigError("state.size", state["size"], rule, "give the loader what it had then")
        self._epoch, self._number = (integer(f"state.{name}", state[name], 0) for name in _PLACE[:2])
        self._inner, self._loader = state["loader"], None
