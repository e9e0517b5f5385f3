"""Latency models: how long a step will take, before it is run. No torch: policies use them on a virtual clock.

Importing this registers the built-in models in LATENCY_MODELS; scikit-learn is imported when one is fitted.
"""

from omniserve.latency import linear, omniserve
from omniserve.latency.base import LATENCY_MODELS, LatencyModel, Predictor
from omniserve.latency.correction import CorrectedModel, ScaledModel
from omniserve.latency.features import BatchFeatures, ModelShape, StepRows, features_of
from omniserve.latency.fitting import Accuracy, accuracy_of, accuracy_of_errors
from omniserve.latency.omniserve import HostSpeed
from omniserve.latency.profile import Profile, ProfileMismatch, StepSample

__all__ = [
    "LATENCY_MODELS",
    "Accuracy",
    "BatchFeatures",
    "CorrectedModel",
    "HostSpeed",
    "LatencyModel",
    "ModelShape",
    "Predictor",
    "Profile",
    "ProfileMismatch",
    "ScaledModel",
    "StepRows",
    "StepSample",
    "accuracy_of",
    "accuracy_of_errors",
    "features_of",
    "linear",
    "omniserve",
]
