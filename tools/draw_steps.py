"""Drawings of pages on one step: replicas, buckets, what a step does not use."""

from drawing import Drawing


def replicas() -> Drawing:
    """Hosts, processes and replicas of a world."""
    drawing = Drawing(
        "Replicas and the world",
        "Two hosts with a process each. Each process has two replicas. All four "
        "replicas hold the same parameters and optimizer state, and each has samples "
        "of its own. An all-reduce along the axis named data averages their "
        "gradients.",
        height=356,
    )
    drawing.frame(16, 14, 688, 294, "world = jdp.init()")
    for host in range(2):
        left = 30 + host * 336
        drawing.frame(left, 42, 324, 184, f"host {'ab'[host]}: process {host}")
        for place in range(2):
            index = 2 * host + place
            x = left + 10 + place * 154
            drawing.frame(x, 70, 150, 144, f"replica {index}")
            drawing.box(x + 8, 98, 134, 54, "parameters and", "state", kind="same")
            first = 16 * index
            drawing.box(x + 8, 160, 134, 44, f"samples {first} to {first + 15}")
            drawing.arrow((x + 65, 214), (x + 65, 253), kind="sent")
            drawing.arrow((x + 85, 254), (x + 85, 215), kind="sent")
    text = 'all-reduce along the axis "data": the average of the gradients'
    drawing.box(40, 254, 640, 40, text, kind="sent")
    drawing.legend(
        332, same="the same on all replicas", own="of one replica", sent="communication"
    )
    return drawing


def step() -> Drawing:
    """A step that averages, and a step that does not."""
    drawing = Drawing(
        "The step",
        "Two replicas in two rows. Both begin with the same state, and each has its "
        "own part of the batch. Their gradients differ. The average over the replicas "
        "makes them the same, and so is the new state. Below, a step without the "
        "average: the new state differs, and the step is refused before it runs.",
        height=402,
    )
    for replica in range(2):
        y = 18 + replica * 98
        middle = y + 58
        drawing.text(16, middle, f"replica {replica}", is_bold=True)
        drawing.box(96, middle - 22, 84, 44, "state", kind="same")
        drawing.arrow((180, middle), (217, middle), kind="same")
        drawing.box(218, y, 152, 24, "its samples", size=12)
        drawing.arrow((294, y + 24), (294, y + 39), kind="own")
        drawing.box(218, y + 40, 152, 36, "loss and gradient")
        drawing.arrow((370, middle), (415, middle), kind="own")
        drawing.arrow((516, middle), (569, middle), kind="same")
        drawing.box(570, middle - 22, 134, 44, "new state", kind="same")
    drawing.box(416, 18, 100, 178, "average", "over the", "replicas", kind="sent")
    drawing.line((16, 222), (704, 222), kind="frame", is_dashed=True)
    drawing.text(16, 246, "Without the average:")
    drawing.box(96, 268, 84, 44, "state", kind="same")
    drawing.arrow((180, 290), (217, 290), kind="same")
    drawing.box(218, 268, 152, 44, "loss and gradient")
    drawing.arrow((370, 290), (415, 290), kind="own")
    drawing.box(416, 268, 100, 44, "new state")
    drawing.arrow((516, 290), (569, 290), kind="wrong")
    drawing.box(570, 264, 134, 52, "refused, by", "leaf and line", kind="wrong")
    note = "jdp follows each value of the traced program, before it runs."
    drawing.text(16, 342, note, size=12)
    meanings = {
        "same": "the same everywhere",
        "own": "differs",
        "sent": "makes it the same",
    }
    drawing.legend(376, **meanings)
    return drawing


def buckets() -> Drawing:
    """A backward pass in time, and the buckets that it fills."""
    drawing = Drawing(
        "Buckets, order and overlap",
        "A time line of a step of four layers. The backward pass begins with layer 3 "
        "and ends with layer 0. Bucket 0 holds the gradients of layer 3 and is sent "
        "while layer 2 is computed. Bucket 1 holds layers 2 and 1, bucket 2 holds "
        "layer 0. Below, the same step with one all-reduce after the backward pass "
        "ends later.",
        height=404,
    )
    backward, layer = 210, 66  # where it begins, and the time of a layer
    ends = [backward + (i + 1) * layer for i in range(4)]  # layers 3, 2, 1, 0
    for top in (34, 262):
        drawing.text(16, top + 17, "compute", is_bold=True)
        drawing.box(118, top, 92, 34, "forward")
        for i in range(4):
            drawing.box(backward + i * layer, top, layer, 34, f"layer {3 - i}")
    drawing.text(backward, 20, "backward pass, the last layer first", size=12)
    sent = {0: (ends[0], 50), 1: (ends[2], 66), 2: (ends[3], 50)}
    filled_from = {0: backward, 1: ends[0], 2: ends[2]}
    for number, (start, duration) in sent.items():
        y = 88 + number * 38
        drawing.text(16, y + 15, f"bucket {number}", is_bold=True)
        begin = filled_from[number]
        drawing.box(begin, y, start - begin, 30, "fills", kind="idle", size=12)
        drawing.box(start, y, duration, 30, "sent", kind="sent")
        drawing.line((start, 68), (start, y), kind="sent", is_dashed=True)
    end = ends[3] + 50
    drawing.box(end, 34, 64, 34, "update", kind="same")
    drawing.arrow((end, 164), (end, 69), kind="sent")
    drawing.line((end + 64, 69), (end + 64, 126), is_dashed=True)
    drawing.line((704, 110), (704, 261), is_dashed=True)
    drawing.arrow((704, 118), (end + 65, 118))
    drawing.text(704, 102, "time saved", anchor="end", size=12)
    drawing.line((16, 218), (704, 218), kind="frame", is_dashed=True)
    drawing.text(16, 240, "One all-reduce after the backward pass:")
    late = ends[3] + 166
    drawing.text(16, 333, "all at once", is_bold=True)
    drawing.box(ends[3], 318, 166, 30, "sent", kind="sent")
    drawing.box(late, 262, 64, 34, "update", kind="same")
    drawing.arrow((late, 318), (late, 297), kind="sent")
    drawing.arrow((118, 380), (704, 380))
    drawing.text(16, 380, "time")
    return drawing


def unused_parameters() -> Drawing:
    """Flags of used parameters, combined over the replicas."""
    drawing = Drawing(
        "Parameters that a step does not use",
        "Two replicas of a model with a trunk and three heads. Both use the trunk. "
        "Replica 0 takes head a, replica 1 takes head b, and neither takes head c. "
        "The trunk and the heads a and b take a step on their average. Head c keeps "
        "its value and its optimizer state, bit for bit.",
        height=336,
    )
    for row in range(2):
        y = 16 + row * 142
        drawing.frame(16, y, 236, 130, f"replica {row}")
        drawing.box(28, y + 54, 76, 36, "trunk")
        for i, name in enumerate("abc"):
            head = y + 12 + i * 38
            is_taken = i == row
            drawing.box(
                160, head, 80, 30, f"head {name}", kind="own" if is_taken else "idle"
            )
            if is_taken:
                drawing.arrow(
                    (104, y + 72), (132, y + 72), (159, head + 15), kind="own"
                )
    drawing.box(
        276, 24, 108, 244, "any replica", "used it?", "", "sent with", "the loss",
        kind="sent",
    )  # fmt: skip
    for y in (81, 207):
        drawing.arrow((252, y), (275, y), kind="sent")
    outcomes = {
        "trunk": ("used by both", "a step on the average"),
        "head a": ("used by replica 0", "a step on the average"),
        "head b": ("used by replica 1", "a step on the average"),
        "head c": ("used by neither", "value and state stay"),
    }
    for i, (name, lines) in enumerate(outcomes.items()):
        y = 24 + i * 64
        drawing.arrow((384, y + 26), (409, y + 26), kind="sent")
        drawing.box(410, y, 84, 52, name, kind="idle" if name == "head c" else "own")
        drawing.arrow((494, y + 26), (519, y + 26))
        kind = "idle" if name == "head c" else "same"
        drawing.box(520, y, 184, 52, *lines, kind=kind)
    drawing.legend(
        314, own="used", idle="not used", sent="communication", same="take a step"
    )
    return drawing


def micro_batches() -> Drawing:
    """Gradients of micro-batches, added up and sent once."""
    drawing = Drawing(
        "Micro-batches",
        "A replica's batch is cut into four micro-batches. Their gradients are "
        "computed one after the other and added up in one copy. After the last, the "
        "buckets are sent once, and the optimizer takes one step.",
        height=250,
    )
    drawing.text(16, 40, "micro-", "batches", is_bold=True)
    for i in range(4):
        x = 96 + i * 96
        drawing.box(x, 18, 90, 60, str(i), "forward and", "backward", size=12)
        drawing.arrow((x + 45, 78), (x + 45, 109), kind="own")
        drawing.text(x + 52, 94, "add", size=12)
    drawing.text(16, 130, "gradients", is_bold=True)
    drawing.box(96, 110, 378, 40, "one sum, in the memory of one gradient", kind="own")
    drawing.arrow((474, 130), (497, 130), kind="sent")
    drawing.box(498, 100, 100, 60, "all buckets,", "once", kind="sent")
    drawing.arrow((598, 130), (621, 130), kind="same")
    drawing.box(622, 100, 82, 60, "update", kind="same")
    drawing.arrow((96, 186), (704, 186))
    drawing.text(16, 186, "time")
    drawing.legend(222, own="own gradients", sent="communication", same="optimizer")
    return drawing


def uneven_inputs() -> Drawing:
    """Batches of three processes over four iterations."""
    drawing = Drawing(
        "Uneven inputs",
        "Three processes and four iterations. Process 0 has four full batches. "
        "Process 1 has three full batches and a smaller one, which is padded with "
        "zeros. Process 2 has two batches and then gets zeros with weight 0. All "
        "leave the loop after iteration 4.",
        height=332,
    )
    samples = [[16, 16, 16, 16], [16, 16, 16, 7], [16, 16, 0, 0]]
    left, column = 116, 134
    for i in range(4):
        middle = left + i * column + 62
        drawing.text(middle, 24, f"iteration {i + 1}", anchor="middle", is_bold=True)
    for process, numbers in enumerate(samples):
        y = 44 + process * 62
        drawing.text(16, y + 22, f"process {process}", is_bold=True)
        for i, number in enumerate(numbers):
            x, width = left + i * column, 124
            full = round(width * number / 16)
            if number:
                label = f"{number} samples" if number == 16 else f"{number}"
                drawing.box(x, y, full, 44, label)
            if number < 16:
                lines = (f"{16 - number} zeros",) if number else ("zeros,", "weight 0")
                drawing.box(x + full, y, width - full, 44, *lines, kind="idle", size=12)
    drawing.text(16, 251, "the mean", is_bold=True)
    for i in range(4):
        total = sum(numbers[i] for numbers in samples)
        x = left + i * column
        drawing.box(x, 230, 124, 42, f"divide by {total}", kind="sent")
    drawing.line((650, 14), (650, 278), kind="wrong")
    drawing.text(658, 60, "all", "leave", "the", "loop", size=12)
    drawing.legend(
        306,
        own="true samples, weight 1",
        idle="padding, weight 0",
        sent="sum of the weights",
    )
    return drawing
