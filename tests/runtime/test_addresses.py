import pytest

from jdp.runtime import addresses


@pytest.mark.parametrize(
    "address,parts",
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("node-0.local:1", ("node-0.local", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
    ],
)
def test_join_inverts_split(address, parts):
    assert addresses.split(address) == parts
    assert addresses.join(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "a",
        "a:",
        "a:x",
        "a:0",
        "a:65536",
        "a:-1",
        "a:1\u0661",
        "::1:80",
        "[]:1",
    ]
    + ["a:000000000001", "fd00::1", "[::1]"],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="must be host:port|must have a port"):
        addresses.split(address)


def test_loopback_addresses_are_known_in_every_form():
    inner = ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]", "::ffff:127.0.0.1"]
    outer = ["10.0.0.1", "fd00::1", "node", "::ffff:10.0.0.1", "1::1"]
    assert [addresses.is_loopback(a) for a in inner + outer] == [True] * 6 + [False] * 5
    assert addresses.unmap("::ffff:10.0.0.1") == "10.0.0.1"
    assert addresses.unmap("::ffff:1") == "::ffff:1"


@pytest.mark.parametrize(
    "reached,expected",
    [
        ([], ("127.0.0.1", True)),
        (["127.0.0.1"] * 3, ("127.0.0.1", True)),
        (["::1"], ("::1", True)),
        (["127.0.0.1", "127.0.1.1"], ("127.0.0.1", False)),
        (["127.0.1.1", "10.0.0.1", "10.0.0.1"], ("10.0.0.1", True)),
        (["10.0.0.1", "10.1.0.1"], ("10.0.0.1", False)),
    ],
)
def test_the_host_is_the_one_that_others_reach(reached, expected):
    assert addresses.choose_host(reached) == expected
