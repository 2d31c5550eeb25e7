import subprocess

from jdp.launch.exit_order import ExitOrder


def test_children_that_ended_before_a_look_come_in_the_order_of_their_ends():
    order, children = ExitOrder(), []
    for process_id in range(4):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        children.append(child)
        order.add(process_id, child.pid)
    assert order.take() == []
    for process_id in (2, 0, 3):
        children[process_id].communicate()  # It has ended, and was waited for.
    assert order.take() == [2, 0, 3]
    assert order.take() == []
    children[1].communicate()
    assert order.take() == [1]
    order.close()
