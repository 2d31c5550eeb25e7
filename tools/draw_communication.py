"""Drawings of pages on what is sent: hooks, shards, all-reduces, agreement, servers."""

from drawing import Drawing

WORKER_TIMES = (60, 66, 120)  # of a gradient, in pixels.
SLOWEST = max(WORKER_TIMES)


def hooks() -> Drawing:
    """A gradient on its way through a hook with a residual."""
    drawing = Drawing(
        "Communication hooks",
        "A gradient passes through a hook. The residual of the last step is added, "
        "the hook compresses the sum, the small message is sent in an all-reduce, and "
        "the mean comes out. What was not sent is the new residual, which is added in "
        "the next step.",
        height=290,
    )
    drawing.frame(16, 16, 476, 214, "a replica")
    drawing.box(28, 58, 96, 76, "gradient,", "float32")
    drawing.arrow((124, 96), (151, 96), kind="own")
    drawing.box(152, 78, 36, 36, "+", kind="host")
    drawing.arrow((188, 96), (215, 96), kind="host")
    drawing.box(216, 68, 108, 56, "compress", kind="host")
    drawing.arrow((324, 96), (357, 96), kind="host")
    drawing.box(358, 78, 120, 36, "small message", kind="sent")
    drawing.arrow((478, 96), (511, 96), kind="sent")
    drawing.box(512, 40, 84, 112, "all-reduce", kind="sent")
    drawing.arrow((554, 186), (554, 153), kind="sent")
    drawing.text(
        554, 198, "messages of the", "other replicas", anchor="middle", size=12
    )
    drawing.arrow((596, 96), (619, 96), kind="sent")
    drawing.box(620, 58, 84, 76, "mean", "gradient", kind="same")
    drawing.box(216, 164, 108, 50, "residual:", "the rest", kind="host")
    drawing.arrow((270, 124), (270, 163), kind="host")
    drawing.arrow((216, 189), (170, 189), (170, 115), kind="host")
    drawing.text(162, 152, "in the next", "step", anchor="end", size=12)
    drawing.legend(
        260, own="own gradient", host="work of the hook", sent="sent", same="the result"
    )
    return drawing


def zero1() -> Drawing:
    """A step on shards: reduce-scatter, optimizer, all-gather."""
    drawing = Drawing(
        "A sharded optimizer state",
        "Three replicas. Each has the gradients of all parameters. A reduce-scatter "
        "gives each replica one third of their sum. Each takes the optimizer's step "
        "on its third, with its third of the state. An all-gather gives all updates "
        "to all replicas.",
        height=334,
    )
    heads = {144: "gradients", 350: "sum", 462: "optimizer", 654: "updates"}
    for x, head in heads.items():
        drawing.text(x, 26, head, anchor="middle", is_bold=True)
    for replica in range(3):
        y = 50 + replica * 74
        drawing.text(16, y + 28, f"replica {replica}", is_bold=True)
        for part in range(3):
            drawing.box(96 + part * 32, y + 8, 32, 40, str(part))
            kind = "same" if part == replica else "idle"
            label = [str(part)] if part == replica else []
            drawing.box(302 + part * 32, y + 8, 32, 40, *label, kind=kind)
            drawing.box(606 + part * 32, y + 8, 32, 40, str(part), kind="same")
        drawing.arrow((192, y + 28), (205, y + 28), kind="sent")
        drawing.arrow((288, y + 28), (301, y + 28), kind="sent")
        drawing.arrow((398, y + 28), (411, y + 28), kind="same")
        drawing.box(412, y, 100, 56, "step, with", f"state {replica}", kind="same")
        drawing.arrow((512, y + 28), (525, y + 28), kind="sent")
        drawing.arrow((596, y + 28), (605, y + 28), kind="sent")
    drawing.box(206, 50, 82, 204, "reduce-", "scatter", kind="sent")
    drawing.box(526, 50, 70, 204, "all-", "gather", kind="sent")
    drawing.text(
        16, 276, "Each replica keeps one third of the optimizer state.", size=12
    )
    drawing.legend(
        308, own="own gradients", sent="communication", same="sums, state, updates"
    )
    return drawing


def local_training() -> Drawing:
    """When replicas communicate, in three ways to train."""
    drawing = Drawing(
        "Training with less frequent averaging",
        "Three time lines of eight steps. Data-parallel training averages gradients "
        "in each step. Local SGD averages parameters after every fourth step. DiLoCo "
        "takes an outer step after every fourth step, from the mean displacement of "
        "the parameters.",
        height=352,
    )
    ways = {
        "data-parallel": ("gradients,", "each step", 1, 0),
        "local_sgd": ("parameters,", "period 4", 4, 0),
        "diloco": ("displacement,", "period 4", 4, 24),
    }
    for row, (name, (what, when, period, outer)) in enumerate(ways.items()):
        y = 18 + row * 92
        drawing.text(16, y + 12, name, is_bold=True)
        drawing.text(16, y + 36, what, when, size=12)
        x = 140
        for number in range(1, 9):
            for replica in range(2):
                drawing.box(x, y + replica * 34, 42, 30, str(number))
            x += 42
            if number % period == 0:
                drawing.box(x, y - 4, 20, 72, kind="sent")
                x += 20
                if outer:
                    drawing.box(x, y - 4, outer, 72, kind="same")
                    x += outer
        drawing.text(x + 10, y + 15, "replica 0", size=12)
        drawing.text(x + 10, y + 49, "replica 1", size=12)
    drawing.arrow((140, 296), (704, 296))
    drawing.text(16, 296, "time")
    drawing.legend(
        326, own="a step on own samples", sent="all replicas average", same="outer step"
    )
    return drawing


def collectives() -> Drawing:
    """A ring beside shared memory in two stages."""
    drawing = Drawing(
        "All-reduces",
        "On the left a ring of four replicas: in each of six rounds, each replica "
        "sends a quarter of its buffer to the next one. On the right shared memory in "
        "two stages: four processes write their buffers, each sums one quarter of all "
        "buffers, and all copy the quarters of the sum.",
        height=402,
    )
    _draw_ring(drawing)
    _draw_shared_memory(drawing)
    drawing.legend(
        378, own="own numbers", sent="sent in round 1, or read", same="sums of all"
    )
    return drawing


def _draw_ring(drawing: Drawing) -> None:
    drawing.frame(16, 16, 300, 336, "ring_all_reduce, 4 replicas")
    corners = [(36, 70), (196, 70), (196, 200), (36, 200)]
    for replica, (x, y) in enumerate(corners):
        drawing.text(x, y - 12, f"replica {replica}", size=12)
        for part in range(4):
            # Replica i sends quarter i - 1 first, and ends with the sum of quarter i.
            kind = "sent" if part == (replica - 1) % 4 else "own"
            drawing.box(x + part * 25, y, 25, 44, str(part), kind=kind)
    drawing.arrow((137, 92), (195, 92), kind="sent")
    drawing.arrow((276, 115), (276, 199), kind="sent")
    drawing.arrow((195, 222), (137, 222), kind="sent")
    drawing.arrow((116, 199), (116, 115), kind="sent")
    drawing.text(
        30,
        272,
        "Each round, each sends one quarter on.",
        "3 rounds: the quarters are summed.",
        "3 rounds: the sums go around.",
        "In all, each sends 6/4 of its buffer.",
        size=12,
    )


def _draw_shared_memory(drawing: Drawing) -> None:
    drawing.frame(332, 16, 372, 336, "shared_memory_all_reduce, 4 processes")
    for process in range(4):
        y = 46 + process * 36
        drawing.text(346, y + 15, f"process {process}", size=12)
        drawing.arrow((414, y + 15), (447, y + 15), kind="own")
        for part in range(4):
            drawing.box(448 + part * 58, y, 58, 30, str(part))
    for part in range(4):
        drawing.arrow((477 + part * 58, 184), (477 + part * 58, 217), kind="sent")
        drawing.box(448 + part * 58, 218, 58, 34, f"sum {part}", kind="same", size=12)
    drawing.text(346, 203, "process i", "sums its", "column i", size=12)
    drawing.text(
        346,
        272,
        "1. All write their buffers into the memory.",
        "2. Each sums one column.",
        "3. All copy the row of sums.",
        "After 1 and after 2, all wait for each other.",
        size=12,
    )


def eager() -> Drawing:
    """The negotiation of two operations between two processes."""
    drawing = Drawing(
        "Collectives by name",
        "Two processes submit the operations a and b in different orders. Each tells "
        "the coordinator which operations are ready. Operation b is ready on both "
        "processes first, then a. The coordinator answers both with this order, and "
        "both processes run b and then a.",
        height=418,
    )
    lanes = {"process 0": 96, "coordinator": 360, "process 1": 624}
    for name, x in lanes.items():
        drawing.text(x, 24, name, anchor="middle", is_bold=True)
        drawing.line((x, 38), (x, 366), kind="frame")
    rows = [
        (46, "a", "b", "a: waits for rank 1", "b: waits for rank 0"),
        (134, "b", None, "b: ready on both", "a: waits for rank 1"),
        (254, None, "a", "a: ready on both", ""),
    ]
    for y, left, right, *notes in rows:
        if left:
            drawing.box(24, y, 144, 30, f'submit "{left}"')
            drawing.arrow((168, y + 15), (271, y + 15), kind="host")
            drawing.text(219, y + 5, f"{left} is ready", anchor="middle", size=12)
        if right:
            drawing.box(552, y, 144, 30, f'submit "{right}"')
            drawing.arrow((552, y + 15), (449, y + 15), kind="host")
            drawing.text(501, y + 5, f"{right} is ready", anchor="middle", size=12)
        drawing.box(272, y - 4, 176, 44, *filter(None, notes), kind="host", size=12)
    for y, name in ((190, "b"), (310, "a")):
        drawing.box(272, y, 176, 32, f"next: {name}", kind="host")
        drawing.arrow((272, y + 16), (169, y + 16), kind="host")
        drawing.arrow((448, y + 16), (551, y + 16), kind="host")
        for x in (24, 552):
            drawing.box(x, y, 144, 32, f'all-reduce "{name}"', kind="sent")
    drawing.legend(
        392, own="call of the program", host="agreement", sent="the data are sent"
    )
    return drawing


def parameter_server() -> Drawing:
    """Servers and workers, and when they wait."""
    drawing = Drawing(
        "Parameter servers",
        "Two servers hold a part of the parameters each. Three workers pull "
        "parameters from both and push gradients to both. Below, time lines: in "
        "synchronous mode every update waits for the slowest worker; in asynchronous "
        "mode each push is an update at once.",
        height=482,
    )
    _draw_links(drawing)
    _draw_sync(drawing, 196)
    _draw_asynchronous(drawing, 324)
    drawing.legend(458, own="gradient", idle="waits", sent="update", same="parameters")
    return drawing


def _draw_links(drawing: Drawing) -> None:
    for server in range(2):
        half = ("first", "second")[server] + " half"
        x = 140 + server * 220
        drawing.box(x, 16, 160, 46, f"server {server}", half, kind="same")
    for worker in range(3):
        x = 60 + worker * 200
        drawing.box(x, 142, 140, 34, f"worker {worker}")
        for server in range(2):
            top, bottom = 200 + server * 220 + (worker - 1) * 36, x + 46 + server * 36
            drawing.arrow((top, 63), (bottom, 141), kind="same")
            drawing.arrow((bottom + 12, 141), (top + 12, 63), kind="sent")
    drawing.text(704, 40, "green: pull", "orange: push", anchor="end", size=12)


def _draw_sync(drawing: Drawing, y: float) -> None:
    drawing.text(16, y, "sync()", is_bold=True)
    for worker, duration in enumerate(WORKER_TIMES):
        lane = y + 16 + worker * 30
        drawing.text(16, lane + 12, f"worker {worker}", size=12)
        for start in range(90, 570, SLOWEST):
            drawing.box(start, lane, duration - 2, 24)
            if duration < SLOWEST:
                rest = SLOWEST - duration - 2
                drawing.box(start + duration, lane, rest, 24, kind="idle")
    for end in range(90 + SLOWEST, 571, SLOWEST):
        drawing.box(end - 7, y + 14, 5, 88, kind="sent")
    drawing.text(584, y + 32, "an update is the", "mean of all", "workers", size=12)


def _draw_asynchronous(drawing: Drawing, y: float) -> None:
    drawing.text(16, y, "asynchronous()", is_bold=True)
    for worker, duration in enumerate(WORKER_TIMES):
        lane = y + 16 + worker * 30
        drawing.text(16, lane + 12, f"worker {worker}", size=12)
        for start in range(90, 571 - duration, duration):
            drawing.box(start, lane, duration - 2, 24)
            drawing.box(start + duration - 7, lane, 5, 24, kind="sent")
    drawing.text(584, y + 32, "an update is", "the push of", "one worker", size=12)


def same_bits() -> Drawing:
    """Four shards on two replicas and on one, added along one tree."""
    drawing = Drawing(
        "The same bits",
        "A batch of four shards, on two replicas and on one. On two, each replica "
        "computes two shards one after the other and adds them; the two sums are "
        "added. On one, a replica computes all four and adds them along the same tree.",
        height=300,
    )
    for row, owners in enumerate(((0, 0, 1, 1), (0, 0, 0, 0))):
        top = 40 + row * 118
        count = 2 - row
        label = f"{count} replica" + ("s" if count > 1 else "")
        drawing.text(16, top + 40, f"on {label}", is_bold=True)
        for i, owner in enumerate(owners):
            x = 130 + i * 90
            kind = "own" if owner == 0 else "sent"
            drawing.box(x, top, 80, 40, f"shard {i}", kind=kind)
        for i in range(2):
            x = 130 + i * 180
            kind = "own" if owners[2 * i] == 0 else "sent"
            drawing.box(x, top + 56, 170, 34, f"{2 * i} + {2 * i + 1}", kind=kind)
        drawing.arrow((480, top + 73), (509, top + 73))
        drawing.box(510, top + 50, 194, 46, "(0 + 1) + (2 + 3)", kind="same")
    drawing.legend(278, own="replica 0", sent="replica 1", same="the same bits")
    return drawing
