"""Settings that earlier versions had, and the sentence with which each is refused now."""

# By dotted name, with NAME for the name of a tier, and ROLE for prefillers or decoders. Each text
# stands behind "was removed; ".
REMOVED = {
    "tier_timeout_s": "the start waits ten minutes for nodes; start again where they take longer",
    "turn_timeout_s": "a turn fails after an hour in which its engine says nothing",
    "queue_limit": "1024 conversations may wait for room; set queue_timeout_s to say for how long",
    "pausing_mark": "idle conversations are paused where others need their room; pausing=off has "
    "none paused",
    "wrong_decision_rate": "it is given with the policy, as placement=per_turn:0.1",
    "min_remote_prefill_tokens": "it is given with the policy, as placement=conversation:200",
    "parking": "histories are parked where pausing is on and the host has memory for them; set "
    "pausing=off to turn both off",
    "prefill_lane": "it is a value of engine_scheduler; set engine_scheduler=conversation_lane",
    "response_store_mb": "each decoder keeps 64 MB of responses; a client that wants none kept "
    "sends `store: false`",
    "tokenizer_cache_mb": "each engine keeps 256 MB of tokenized text",
    "lmcache.timeout_s": "an engine waits ten seconds for a transfer of KV, and recomputes it then",
    "lmcache.http_port": "the admin interface has the port after lmcache.port, and a free one with "
    "lmcache.port=0",
    "lmcache.chunk_tokens": "a chunk has 128 tokens on a CPU and 256 on a GPU; set "
    "engine.block_size to have chunks of whole blocks of that size",
    "ROLE.resources": "set tier to the Ray custom resource that marks the role's nodes",
    "tiers.NAME.power_cap_w": "set power_cap to the number of watts",
    "tiers.NAME.power_cap_fraction": "set power_cap to a percentage, such as 70%",
    "autoscaling.target": "a change in a role's number of engines brings utilisation to 0.7",
    "autoscaling.up_at": "engines are added when utilisation is above 0.85",
    "autoscaling.down_at": "engines are removed when utilisation stays below 0.5",
    "autoscaling.down_delay_s": "it is a fifth of drain_timeout_s",
    "autoscaling.drain_timeout_s": "set drain_timeout_s, which routers follow too",
    "autoscaling.cool_down_s": "it is a fifth of drain_timeout_s",
    "environments.container_engine": "containers are run by `docker`, or else `podman`, where one "
    "answers",
    "environments.most_of_tenant": "it is a quarter of environments.most",
    "environments.disk_bytes": "environments take environments.most times "
    "environments.limits.disk_bytes at most",
    "environments.first_port": "environments get ports from 28000 on, eight each",
    "environments.preparing": "four environments are prepared at a time",
    "environments.running": "32 commands run at a time, and others wait",
    "environments.waiting": "256 commands may wait",
    "environments.near": "an environment is prepared when its conversation is bound, or one of the "
    "first four that wait",
    "environments.unclaimed_s": "an environment whose conversation has not begun is removed after "
    "two minutes",
    "environments.limits.cpu_s": "it is half of environments.limits.wall_s",
    "environments.limits.file_bytes": "it is environments.limits.disk_bytes",
    "environments.limits.open_files": "a process may have 256 files open",
    "environments.limits.output_bytes": "64 KiB of each of a command's two outputs are kept",
    "engine_host": "engines listen on loopback with nodes=one, and on their node's address with "
    "nodes=several",
}
