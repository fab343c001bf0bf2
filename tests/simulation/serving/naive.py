"""One replica, one step and one token at a time: what the simulator that jumps must agree with.

Nothing here is shared with it but the formula of a step, the demands and the limits.
"""

import math
from dataclasses import dataclass, field


@dataclass
class One:
    index: int
    arrival: float
    prompt: int
    output: int
    produced: int = 0
    cached: int = 0
    target: int = 0  # tokens of the prefill that is under way
    started: float | None = None
    first: float | None = None
    finished: float | None = None
    preemptions: int = 0


@dataclass
class Naive:
    """Serve demands; `seen` holds a line for each step."""

    costs: object
    scheduling: object
    waiting: list = field(default_factory=list)
    ready: list = field(default_factory=list)
    prefilling: list = field(default_factory=list)
    running: list = field(default_factory=list)  # in the order of joining
    done: list = field(default_factory=list)
    time: float = 0.0
    moving: float = 0.0
    filling: bool = True
    steps: int = 0
    peak_blocks: int = 0

    def serve(self, demands):
        coming = [One(k, d.arrival, d.prompt, d.output) for k, d in enumerate(demands)]
        while coming or self.waiting or self.ready or self.prefilling or self.running:
            while coming and coming[0].arrival <= self.time:
                self.waiting.append(coming.pop(0))
            if not self.step():
                self.time = coming[0].arrival
        return sorted(self.done, key=lambda r: r.index)

    # blocks, counted anew each time

    def blocks(self, tokens):
        return math.ceil(tokens / self.costs.block_tokens)

    def used(self):
        held = sum(self.blocks(r.cached) for r in self.running) + sum(self.blocks(r.target) for r in self.prefilling)
        assert held <= self.costs.kv_blocks
        self.peak_blocks = max(self.peak_blocks, held)
        return held

    def room_for(self, blocks):
        busy = bool(self.running or self.prefilling)
        spare = math.ceil(self.scheduling.watermark * self.costs.kv_blocks) + self.growth() if busy else 0
        slots = len(self.running) + len(self.prefilling) < self.scheduling.max_batch
        return slots and self.used() + blocks + spare <= self.costs.kv_blocks

    def growth(self):
        return sum(self.blocks(r.cached + 1) - self.blocks(r.cached) for r in self.running)

    # decisions

    def step(self):
        while self.ready and not (self.waiting and self.waiting[0].index < self.ready[0].index):
            if not self.room_for(self.blocks(self.ready[0].cached + 1)):
                break
            back = self.ready.pop(0)
            self.moving += self.costs.swap_seconds(back.cached)
            self.running.append(back)
        policy = self.scheduling.policy
        if policy == "chunked":
            return self.chunked()
        if policy == "decode-first":
            self.filling = self.filling or not self.running
        if (policy == "prefill-first" or self.filling) and self.prefill():
            return True
        self.filling = False
        return self.decode()

    def admit(self, most=None):
        if not self.waiting or (self.ready and self.ready[0].index < self.waiting[0].index):
            return False
        request = self.waiting[0]
        target = request.prompt + request.produced
        if (most is not None and target > most) or not self.room_for(self.blocks(target)):
            return False
        self.waiting.pop(0)
        request.cached, request.target = 0, target
        self.prefilling.append(request)
        if request.started is None:
            request.started = self.time
        return True

    def prefill(self):
        if not self.admit():
            return False
        left = self.scheduling.max_step_tokens - self.prefilling[0].target
        while left > 0 and self.admit(most=left):
            left -= self.prefilling[-1].target
        self.work([], [(r, r.target) for r in self.prefilling])
        return True

    def decode(self):
        if not self.running:
            return False
        while self.used() + self.growth() > self.costs.kv_blocks:
            self.preempt()
        self.work(list(self.running), [])
        return True

    def chunked(self):
        if not self.prefilling and not self.waiting:
            return self.decode()
        while self.used() + self.growth() > self.costs.kv_blocks:
            self.preempt()
        left = self.scheduling.max_step_tokens - len(self.running)
        chunks = []
        for request in self.prefilling:
            chunk = min(left, request.target - request.cached)
            if chunk:
                chunks.append((request, chunk))
            left -= chunk
        while left and self.admit():
            chunk = min(left, self.prefilling[-1].target)
            chunks.append((self.prefilling[-1], chunk))
            left -= chunk
        if not chunks and not self.running:
            return False
        self.work(list(self.running), chunks)
        return True

    def preempt(self):
        if self.prefilling:
            request = self.prefilling.pop()
            self.waiting.insert(0, request)
        else:
            request = self.running.pop()
            if self.scheduling.preemption == "swap":
                self.moving += self.costs.swap_seconds(request.cached)
                self.ready.insert(0, request)
            else:
                self.waiting.insert(0, request)
        request.preemptions += 1

    # one step

    def work(self, decoding, chunks):
        self.used()
        contexts = [r.cached + 1 for r in decoding]
        self.time += self.moving + self.costs.step_seconds(contexts, [(r.cached, new) for r, new in chunks])
        self.moving = 0.0
        self.steps += 1
        for request in decoding:
            request.cached += 1
            request.produced += 1
            if request.produced == request.output:
                self.finish(request, self.running)
        for request, new in chunks:
            request.cached += new
            if request.cached == request.target:
                request.produced += 1
                if request.first is None:
                    request.first = self.time
                if request.produced == request.output:
                    self.finish(request, self.prefilling)
                else:
                    self.prefilling.remove(request)
                    self.running.append(request)

    def finish(self, request, where):
        where.remove(request)
        request.finished = self.time
        self.done.append(request)
