"""Core options from settings."""

from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.replicas import replica_settings
from lorrery.service.settings.cluster import Settings


def test_a_setting_and_the_core_option_of_its_name_have_one_default():
    settings = Settings()
    own = settings.scheduler
    assert replica_settings(settings, 1000) == ReplicaSettings(own.policy, 1000, own.max_req_total_len)
