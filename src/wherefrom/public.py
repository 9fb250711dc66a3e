"""Everything that `wherefrom.` names, imported at once, when the first of it is asked for."""

from . import baselines, data, evaluation, models, planning
from .adapters.model import Model, from_model, from_pipeline
from .adapters.scheduler import from_scheduler
from .attribution.result import Attribution
from .diffusion.denoiser import Coverage, Denoiser
from .diffusion.draws import Draw, Draws
from .diffusion.process import EDM, FlowMatching, Process
from .diffusion.sampling import sample
from .diffusion.training import train
from .diffusion.variance_preserving import DDPM, SamplePrediction, VPrediction
from .errors import WherefromError
from .factors.needs import Needs, needs
from .layers.kinds import Factors, LayerKind, Part, layer_kind
from .models.presets import Preset, preset
from .running.ranks import merging, shard
from .tid.index import Index
from .tid.teacher import TID
from .tide.bank import Bank
from .tide.loss import lambda_rank_loss, list_mle_loss, listwise_loss
from .tide.student import TIDE

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
    "Factors",
    "FlowMatching",
    "Index",
    "LayerKind",
    "Model",
    "Needs",
    "Part",
    "Preset",
    "Process",
    "SamplePrediction",
    "VPrediction",
    "WherefromError",
    "baselines",
    "data",
    "evaluation",
    "from_model",
    "from_pipeline",
    "from_scheduler",
    "lambda_rank_loss",
    "layer_kind",
    "list_mle_loss",
    "listwise_loss",
    "merging",
    "models",
    "needs",
    "planning",
    "preset",
    "sample",
    "shard",
    "train",
]
