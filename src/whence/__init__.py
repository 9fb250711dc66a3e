"""whence: which training images made this generated image?"""

from . import baselines, data, evaluation, models
from .attribution import Attribution
from .bank import Bank
from .diffusion.denoiser import Coverage, Denoiser
from .diffusion.draws import Draw, Draws
from .diffusion.process import DDPM, EDM, FlowMatching, Process, VPrediction
from .diffusion.sampling import sample
from .diffusion.training import train
from .errors import WhenceError
from .presets import Preset, preset
from .tid import TID
from .tide.ranking import lambda_rank_loss
from .tide.student import TIDE

__version__ = "0.1.0"

__all__ = [
    "DDPM",
    "EDM",
    "TID",
    "TIDE",
    "Attribution",
    "Bank",
    "Coverage",
    "Denoiser",
    "Draw",
    "Draws",
    "FlowMatching",
    "Preset",
    "Process",
    "VPrediction",
    "WhenceError",
    "baselines",
    "data",
    "evaluation",
    "lambda_rank_loss",
    "models",
    "preset",
    "sample",
    "train",
]
