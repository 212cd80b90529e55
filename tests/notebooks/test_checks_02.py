"""The graders of notebook 02: a skip over the cut, and a U-Net that the reader splits."""

import torch

import checks
from tests.notebooks.answers import PASSED, defined, solution, table
from virtualgpu import session
from virtualgpu.hardware.specs import find_specs

NO_GRAD = "    def forward", "    @torch.no_grad()\n    def forward"
ABOVE, SKIP = 'self.above(h.to("cuda:1"))', ' + x.to("cuda:1")'
TRAVELS = '(nn.functional.linear(h, self.above.weight.to("cuda:0"), self.above.bias.to("cuda:0")) + x).to("cuda:1")'

test_skip_repaired = table(checks.skip_repaired, "02", "RepairedSkipNet", [
    ((SKIP, " + x"), "at least two devices, cuda:1 and cuda:0!"),
    ((SKIP, ""), "the numbers are not those"),
    ((SKIP, ' + x.detach().to("cuda:1")'), "another gradient arrives than without GPUs at x"),
    ((ABOVE, 'nn.functional.linear(h.to("cuda:1"), self.above.weight.detach(), self.above.bias.detach())'), "no gradient arrives at above.weight"),
    (NO_GRAD, "or under no_grad?"),
    ((ABOVE + SKIP, ABOVE + ".cpu() + x.cpu()"), "are right, but cpu computes"),
    ((ABOVE + SKIP, TRAVELS), "but cuda:1 computes nothing"),
    ((ABOVE + SKIP, "self.above.to(x.device)(h) + x"), "the layers should stay on cuda:0 and cuda:1; they are on cuda:0 and cuda:0"),
    (("h = torch.relu(self.below(x))", "while True: pass"), "after 20 seconds rank 0 stands in ... ?"),
    ((SKIP, '.to("cuda:0") + x'), PASSED),
    ((SKIP, ' + x.cpu().to("cuda:1")'), PASSED),
])  # fmt: skip

UNET, SHAPE = defined("02", "UNet")["UNet"], (96, 3, 128, 128)
DOWN = "fine = self.down1(x)"
MIDDLE = "self.middle(self.shrink(coarse))"
ALL_ON_0 = '"cuda:1"', '"cuda:0"'
HOOK = '        self.grow.register_forward_pre_hook(lambda layer, inputs: inputs[0].to("cuda:1"))\n\n    def forward'

test_split_in_two = table(checks.split_in_two, "02", "SplitUNet", [
    (ALL_ON_0, "96 images do not fit into two GPUs of 2 GiB: cuda:0 is full, and cuda:1 has held 0"),
    (('"cuda:0"', '"cuda:1"', DOWN, 'fine = self.down1(x.to("cuda:1"))'), "cuda:1 is full, and cuda:0 has held 18 MiB so far"),
    (("            layer.to(", '            layer if name == "out" else layer.to('), "out.weight is still on the CPU"),
    (("fine.to(", "0 * fine.to("), "its outputs are not the plain model's"),
    (("fine.to(", "fine.detach().to("), "not the gradient of down1.0.weight: was something detached"),
    (NO_GRAD, "or under no_grad?"),
    ((DOWN, 'out = UNet.forward(self.to("cuda:0"), x)\n        self.to("cuda:1")\n        return out\n        ' + DOWN), "was moved in forward: let the activations travel"),
    (("self.out(x)", "nn.functional.conv2d(x.cpu(), self.out.weight.cpu(), self.out.bias.cpu())"), "cpu computes"),
    (("        for name", "        self.all = nn.Sequential(self.down1, self.down2)\n        for name"), "has the name all.0.0.weight"),
    ((DOWN, "while True: pass"), "after 60 seconds rank 0 stands in ... ?"),
    (('"cuda:1"', '"cuda:2"', '"cuda:0"', '"cuda:1"', '"cuda:2"', '"cuda:0"', "self.down1(x)", 'self.down1(x.to("cuda:1"))'), PASSED),  # swapped
    ((MIDDLE + '.to("cuda:1")', MIDDLE, "\n    def forward", HOOK), PASSED),  # it crosses in a hook
], UNET, SHAPE, "2 GiB")  # fmt: skip


def test_a_model_that_fits_on_one_gpu_must_use_both(says):
    said = "it fits on one GPU, and the other does nothing"
    says(said, checks.split_in_two, *solution("02", "SplitUNet", *ALL_ON_0), UNET, SHAPE, memory="15 GiB")


def test_gpus_that_play_real_ones_are_there_after_grading(says, monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "real")
    session.activate(find_specs(2, "T4", None))
    x = torch.ones(3, device="cuda:1")
    says(PASSED, checks.skip_repaired, *solution("02", "RepairedSkipNet"))
    assert torch.cuda.device_count() == 2 and (x + 1).device == torch.device("cuda:1")
