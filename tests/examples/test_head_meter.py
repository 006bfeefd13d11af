import head_meter
import torch

MIB = 2**18  # fp32 elements


def test_the_peak_is_what_lives_at_the_same_time():
    before = torch.ones(MIB)

    def step():
        a = before + 1  # 1 MiB
        b = torch.cat([a, a])  # 3
        del a  # 2
        view = b[MIB:]
        view.mul_(2)  # in place, and a view: still 2
        del b, view  # 0
        before.add_(1)
        torch.ones(2 * MIB)  # 2, at once gone

    assert head_meter.peak_mib(step, torch.device("cpu")) == 3.0


def test_the_backward_is_counted():
    weight = torch.ones(MIB, requires_grad=True)

    def step():
        (weight * weight).sum().backward()  # the product; then the gradient, an expanded scalar, times weight, twice

    assert 2.0 <= head_meter.peak_mib(step, torch.device("cpu")) <= 3.01
    assert weight.grad is not None
