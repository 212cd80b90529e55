"""What one_card.py runs beside torchvision's models: a function each, which takes a row of published.csv and returns a step."""

from tests.accuracy.programs.language import bert, gpt2, llama, lstm, medium, offloaded, transformer, translation
from tests.accuracy.programs.pictures import (
    contrast,
    correct,
    critic,
    dcgan,
    diffusion,
    recipe,
    segmentation,
    unet,
    video,
)
from tests.accuracy.programs.vectors import (
    autoencoder,
    dlrm,
    factors,
    gnn,
    optimizer,
    perceptron,
    points,
    policy,
    speech,
)

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
