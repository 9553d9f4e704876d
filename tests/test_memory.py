"""The choice of memory for a Group with backend "cuda"; no GPU needed."""

import dataclasses
import itertools

import pytest

from jax_ep import memory

DOMAIN = "ab12.1"


def ranks_on(*hosts, domains=None, **common):
    """Ranks 0, 1, ... on the hosts named; by default all in one NVLink domain that works."""
    settings = dict(subgroup=0, asked=None, device="0 (GPU)", fabric_obstacle=None,
                    nvlink_domain=DOMAIN, domain_obstacle=None) | common
    result = [memory.Reach(rank=rank, host=host, hostname="node", **settings)
              for rank, host in enumerate(hosts)]
    if domains is not None:
        result = [dataclasses.replace(rank, nvlink_domain=domain,
                                      domain_obstacle=None if domain else "no fabric")
                  for rank, domain in zip(result, domains)]
    return result


def no_fabric(ranks):
    return [dataclasses.replace(rank, fabric_obstacle="not permitted") for rank in ranks]


@pytest.mark.parametrize("ranks", [
    ranks_on("a"), ranks_on("a", "a"), no_fabric(ranks_on("a", "a")),
    ranks_on("a", "a", domains=[None, DOMAIN]),
])
def test_one_host_needs_no_fabric(ranks):
    assert memory.choose(ranks) == ("ipc", "all ranks of a group are on one host")


def test_hosts_of_one_domain():
    kind, reason = memory.choose(ranks_on("a", "a", "b", "b"))
    assert kind == "fabric" and "several hosts" in reason


def test_groups_that_stay_within_hosts():
    """Ranks of different groups exchange nothing."""
    ranks = ranks_on("a", "a") + [dataclasses.replace(rank, subgroup=1)
                                  for rank in ranks_on("b", "b", domains=[None, None])]
    assert memory.choose(no_fabric(ranks))[0] == "ipc"


def test_one_group_across_hosts_decides_for_all():
    ranks = ranks_on("a", "a") + [dataclasses.replace(rank, subgroup=1)
                                  for rank in ranks_on("a", "b")]
    assert memory.choose(ranks)[0] == "fabric"


def test_hosts_of_different_domains():
    with pytest.raises(RuntimeError) as info:
        memory.choose(ranks_on("aaaaaaaa-1", "bbbbbbbb-1", domains=["ab12.1", "ab12.2"]))
    for part in ["ranks 0 and 1:", "host node (aaaaaaaa)", "host node (bbbbbbbb)",
                 "two NVLink domains, ab12.1 and ab12.2", "no RDMA"]:
        assert part in str(info.value)


def test_hosts_without_a_domain():
    with pytest.raises(RuntimeError, match=r"ranks 0 and 1: no NVLink domain .* \(b\), no fabric"):
        memory.choose(ranks_on("a", "b", domains=[DOMAIN, None]))


@pytest.mark.parametrize("asked, hosts", [(None, ["a", "b"]), ("fabric", ["a", "a"]),
                                          ("fabric", ["a"])])
def test_no_fabric_handles(asked, hosts):
    """Every rank needs them, also one with nobody to reach: its allocation is of that kind."""
    ranks = ranks_on(*hosts, asked=asked)
    with pytest.raises(RuntimeError, match="rank 0: host node .* fabric handles: not permitted"):
        memory.choose(no_fabric(ranks[:1]) + ranks[1:])


def test_asked_for():
    assert memory.choose(ranks_on("a", "a", asked="fabric")) == ("fabric", "JAX_EP_MEMORY=fabric")
    assert memory.choose(ranks_on("a", "a", asked="ipc"))[0] == "ipc"
    with pytest.raises(RuntimeError, match="ranks 0 and 1: CUDA IPC does not connect host node"):
        memory.choose(ranks_on("a", "b", asked="ipc"))
    with pytest.raises(RuntimeError, match="must be one of .*'ipc', 'fabric'.* got 'rdma'"):
        memory.choose(ranks_on("a", asked="rdma"))
    with pytest.raises(RuntimeError, match="JAX_EP_MEMORY differs between .*: fabric, unset"):
        memory.choose(ranks_on("a") + ranks_on("a", asked="fabric"))


def test_every_order_of_ranks_chooses_alike():
    ranks = ranks_on("a", "a", "b")
    assert {memory.choose(order) for order in itertools.permutations(ranks)} == {
        memory.choose(ranks)}


def test_an_error_stays_readable():
    """72 ranks that nothing connects: one reason for each pair of hosts, and a few of the pairs."""
    hosts = [f"{host:08d}" for host in range(18) for _ in range(4)]
    with pytest.raises(RuntimeError) as info:
        memory.choose(ranks_on(*hosts, asked="ipc"))
    text = str(info.value)
    assert text.count("CUDA IPC") == 18 * 17 // 2 and "and 8 more pairs" in text


def test_reach(monkeypatch):
    class Native:
        def reach(self, device):
            return dict(host="a", device=f"{device} (GPU)", fabric_obstacle=None,
                        nvlink_domain=None, domain_obstacle="no fabric")

    monkeypatch.setenv(memory.VARIABLE, "fabric")
    reach = memory.reach(Native(), 3, subgroup=1, rank=2)
    assert (reach.subgroup, reach.rank, reach.device, reach.asked) == (1, 2, "3 (GPU)", "fabric")
    monkeypatch.setenv(memory.VARIABLE, "")
    assert memory.reach(Native(), 3, subgroup=1, rank=2).asked is None
