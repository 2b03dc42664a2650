"""Settings of a ConServe application: one model, validated once, at start.

The same fields are given on the command line (``serve run conserve.app decoders=3``) and as
``args`` of a Serve config file. An unknown field or a bad value is refused with its name.
"""

from conserve.settings.application import EMBEDDED_MODEL, EMBEDDED_MODELS, Settings, SettingsError
from conserve.settings.groups import (
    CPU_TIER,
    GPU_TIER,
    AutoscalingSettings,
    DiskSettings,
    EnvironmentSettings,
    LimitSettings,
    LMCacheSettings,
    MediaSettings,
    RoleSettings,
    TierSettings,
    TLSSettings,
)
from conserve.settings.loading import load
