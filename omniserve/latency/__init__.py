"""Latency models: how long a step will take, before it is run. No torch: policies use them on a virtual clock.

Importing this registers the built-in models in LATENCY_MODELS; scikit-learn is imported when one is fitted.

A **profile** holds what ``python -m omniserve.profile`` measured on this device: the engine's own modules alone, and
whole steps of a mixed load. Its fingerprint names everything that a time depends on; a profile with another fingerprint
is refused. A **latency model** made of it predicts a step from its ``BatchFeatures``, counts that follow from the plan
alone. ``CorrectedModel`` then moves each term slowly, within bounds, towards what steps really take, and multiplies all
by the machine's pace, the median of the last few steps. Both lose their say as time passes without steps.

Collectives and hand-overs between ranks are terms of the profile. Links to CPU hosts and prefill engines are not, as no
step waits for them, and as they come and go. What they cost is learned in service: from how often results are there in
time (``sched/late_joins.py``), and from how long prompts take there (``sched/sources/prefill.py``).
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
