"""Several players may listen to the reads of one module."""

import copy

import torch
from torch import nn

from strategies.sharding.unshard_on_read import Parameters, listen, unlisten


def listening(net):
    heard = [], []
    reads = [lambda weights, said=said: said.extend(map(id, weights)) for said in heard]
    for read in reads:
        listen(net.modules(), read)
    return heard, reads


def test_each_hears_every_read():
    net = nn.Linear(2, 2)
    heard, _ = listening(net)
    weight = net.weight
    assert heard == ([id(weight)], [id(weight)])
    net(torch.zeros(1, 2))
    assert heard[0] == heard[1]
    assert len(heard[0]) == 3


def test_one_may_leave_and_the_last_leaves_a_plain_dict():
    net = nn.Linear(2, 2)
    heard, reads = listening(net)
    unlisten(net.modules(), reads[0])
    assert net.weight is not None
    assert [len(said) for said in heard] == [0, 1]
    unlisten(net.modules(), reads[1])
    assert type(net._parameters) is dict
    unlisten(net.modules(), reads[1])


def test_a_copy_is_not_listened_to():
    net = nn.Linear(2, 2)
    listening(net)
    own = copy.deepcopy(net)
    assert isinstance(net._parameters, Parameters)
    assert type(own._parameters) is dict
