"""What one_card.py runs beside torchvision's models: a function each, which takes a row of published.csv and returns a step."""

from tests.accuracy.programs.diffusion import diffusion
from tests.accuracy.programs.generators import critic, dcgan
from tests.accuracy.programs.gpt2 import gpt2, medium, offloaded
from tests.accuracy.programs.optimizers import optimizer
from tests.accuracy.programs.perceptrons import autoencoder, perceptron, policy
from tests.accuracy.programs.pictures import contrast, correct, recipe, segmentation, unet, video
from tests.accuracy.programs.signals import points, speech
from tests.accuracy.programs.small_llama import llama
from tests.accuracy.programs.tables import dlrm, factors, gnn
from tests.accuracy.programs.words import bert, lstm, transformer, translation

PROGRAMS = {  # by the table's column "model"
    "gpt2": gpt2,
    "optimizer": optimizer,
    "unet": unet,
    "lstm": lstm,
    "perceptron": perceptron,
    "dlrm": dlrm,
    "dcgan": dcgan,
    "gnn": gnn,
    "nn.Transformer": transformer,
    "deeplabv3_resnet50": segmentation,
    "r3d_18": video,
    "diffusion": diffusion,
    "SimCLR": contrast,
    "WGAN-GP": critic,
    "PointNet": points,
    "wav2vec": speech,
    "resnet50 recipe": recipe,
    "resnet34 correct": correct,
    "Llama 1B": llama,
    "GPT-2": medium,
    "BERT base": bert,
    "GRU translation": translation,
    "VAE": autoencoder,
    "PPO": policy,
    "factors": factors,
    "GPT-2 on the host": offloaded,
}
