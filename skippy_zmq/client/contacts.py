"""The stages of a pipeline as one client knows them: where they are, who welcomed it, whether they are ready. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from skippy_zmq.client.outcomes import Action, Connect, Leave, Send
from skippy_zmq.errors import DeadlineError, EndpointError, SkippyError
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.messages import Hello, StageFacts, Welcome


@dataclass(slots=True)
class Peer:
    connected: bool = False
    welcomed: bool = False
    stage: str = ""  # who welcomed us: another one once the stage was restarted
    ready: bool = False  # as it said last
    detail: str = ""  # why the last attempt to connect failed
    refusal: SkippyError | None = None


class Contacts:
    """``endpoint``: stage 0, under the address that the caller gave. ``do`` takes what is to be done."""

    def __init__(self, endpoint: str, hello: Hello, do: Callable[[Action], None]) -> None:
        self.endpoint = endpoint
        self.stages: tuple[StageFacts, ...] = ()
        self.ready = False  # the pipeline, as stage 0 told
        self.peers: dict[str, Peer] = {}
        self._hello = hello
        self._do = do
        self.meet(endpoint)

    @property
    def first(self) -> Peer:
        return self.peers[self.endpoint]

    @property
    def last_endpoint(self) -> str:
        return self.address(self.stages[-1]) if self.stages else self.endpoint

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent: the pipeline is ready and both of its ends have welcomed us."""
        last = self.peers.get(self.last_endpoint)
        if not self.ready or not self.first.welcomed or last is None:
            return False
        # It may have been restarted; stage 0 and the connection tell of that in either order.
        return last.welcomed and last.stage == self.stages[-1].stage

    def address(self, stage: StageFacts) -> str:
        """Where ``stage`` is reached."""
        return self.endpoint if stage.endpoint == self.stages[0].endpoint else stage.endpoint

    def meet(self, endpoint: str) -> None:
        if endpoint not in self.peers:
            self.peers[endpoint] = Peer()
            self._do(Connect(endpoint))

    def connected(self, endpoint: str) -> None:
        self.peers[endpoint] = Peer(connected=True)
        self._do(Send(endpoint, encode(self._hello)))

    def lost(self, endpoint: str, detail: str) -> None:
        self.peers[endpoint] = Peer(detail=detail)
        if endpoint == self.endpoint:
            self.ready = False

    def welcomed(self, endpoint: str, message: Welcome) -> None:
        peer = self.peers[endpoint]
        peer.welcomed, peer.ready, peer.stage = True, message.ready, message.stages[0].stage

    def learn(self, stages: tuple[StageFacts, ...], ready: bool) -> list[str]:
        """Take what stage 0 says; where the stages of a ready pipeline are not any more is left, and returned."""
        self.stages, self.ready = stages, ready
        if not ready:
            return []
        self.meet(self.last_endpoint)
        known = {self.endpoint, *(stage.endpoint for stage in stages)}
        left = [endpoint for endpoint in self.peers if endpoint not in known]
        for endpoint in left:
            del self.peers[endpoint]
            self._do(Leave(endpoint))
        return left

    def failure(self, target: str | None, seconds: float) -> SkippyError:
        """Why ``target``, or (None) the pipeline as a whole, could not be asked within ``seconds``."""
        endpoint = target or self.endpoint
        if target is None and self.first.welcomed and self.ready:
            endpoint = self.last_endpoint
        peer = self.peers[endpoint]
        if not peer.connected:
            why = f" ({peer.detail.removeprefix(f'{endpoint}: ')})" if peer.detail else ""
            return EndpointError(f"cannot reach {endpoint}: nothing answered within {seconds:g} s{why}")
        if not peer.welcomed:
            return DeadlineError(f"{endpoint}: connected, but no stage answered within {seconds:g} s")
        known = ", ".join(f"{stage.layer_start}:{stage.layer_end}" for stage in self.stages)
        n_layers = self.stages[0].n_layers if self.stages else 0
        return DeadlineError(
            f"{endpoint}: the pipeline was not ready within {seconds:g} s: has layers {known} of {n_layers}",
            code="not_ready",
        )
