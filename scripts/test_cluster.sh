#!/usr/bin/env bash
# `ray up cluster.yaml` for real, on this machine: from an empty home, over SSH on loopback, to an
# answered chat completion, and `ray down`. `make test-cluster` runs it; it takes some ten minutes.
#
# It needs root, for a mount and a process namespace of its own: in them the user's home and
# /tmp/ray are empty, and `ray stop` sees no Ray processes but its own. Whatever is left at the end
# goes with the namespace.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$(getent passwd "$(id -u)" | cut -d: -f6)
ray=$repository/.venv/bin/ray
ready_timeout_s=600

fail() {
    echo "test-cluster: $*" >&2
    exit 1
}

require() {
    [ "$(id -u)" = 0 ] || fail "needs root, for namespaces of its own"
    for tool in ssh ssh-keygen rsync unshare curl /usr/sbin/sshd; do
        command -v "$tool" >/dev/null || fail "$tool is missing (Debian: apt-get install" \
            "openssh-server openssh-client rsync util-linux curl)"
    done
    [ -x "$ray" ] || fail "$ray is missing: make install"
    case $repository/ in "$home"/*) fail "the repository is in $home, which is to be empty" ;; esac
    for port in 22 6379 7610 7611 8000 8265; do
        ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || fail "port $port is in use"
    done
}

# Show a command as a user would type it, and run it.
run() {
    echo "\$ ${*//$repository\/.venv\/bin\//}"
    "$@"
}

start_sshd() {
    install -d -m 700 "$home/.ssh"
    mkdir -p /run/sshd
    ssh-keygen -q -t ed25519 -N "" -f "$home/.ssh/id_ed25519"
    cp "$home/.ssh/id_ed25519.pub" "$home/.ssh/authorized_keys"
    ssh-keygen -q -t ed25519 -N "" -f "$work/host_key"
    # pip finds its indexes as it does for who runs this; all else of the home is gone.
    local pip=(PIP_CONFIG_FILE="$work/pip.conf")
    while IFS= read -r line; do pip+=("$line"); done < <(env | grep '^PIP_' || true)
    cat >"$work/sshd_config" <<CONFIG
ListenAddress 127.0.0.1
HostKey $work/host_key
PidFile $work/sshd.pid
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
SetEnv ${pip[*]}
CONFIG
    /usr/sbin/sshd -f "$work/sshd_config" -E "$work/sshd.log"
}

wait_until_ready() {
    local deadline=$((SECONDS + ready_timeout_s)) health
    until health=$(curl -sS --max-time 10 http://127.0.0.1:8000/health 2>/dev/null) &&
        [[ $health == *'"prefillers":1'*'"decoders":2'* ]]; do
        [ $SECONDS -lt $deadline ] || {
            "$ray" exec cluster.yaml 'RAY_AUTH_MODE=token serve status' || true
            fail "not ready after $ready_timeout_s s; last said: ${health:-nothing}"
        }
        sleep 2
    done
    echo "ready: $health"
}

inside() {
    work=$1
    mkdir "$work/home" "$work/ray"
    for file in "$home/.config/pip/pip.conf" "$home/.pip/pip.conf" /etc/pip.conf; do
        if [ -f "$file" ]; then
            cp "$file" "$work/pip.conf"
            break
        fi
    done
    # The `ray` that is called here may need a Python that is installed in the home.
    local base
    base=$("$repository/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
    if [[ $base == "$home"/* ]]; then
        mkdir -p "$work/python" "$work/home/${base#"$home"/}"
        mount --bind "$base" "$work/python"
    fi
    mount --bind "$work/home" "$home"
    [ ! -d "$work/python" ] || mount --bind "$work/python" "$base"
    mkdir -p /tmp/ray
    mount --bind "$work/ray" /tmp/ray
    export HOME=$home RAY_USAGE_STATS_ENABLED=0
    unset RAY_ADDRESS PYTHONPATH VIRTUAL_ENV CONSERVE_HOME
    start_sshd
    cd "$repository"

    # As a local Ray on this machine has left it, readable by all users.
    "$ray" get-auth-token --generate >/dev/null

    run "$ray" up cluster.yaml --yes
    wait_until_ready
    run "$ray" exec cluster.yaml 'conserve doctor --address auto nodes=several' | tee "$work/said"
    grep -q 'token: Ray at .* answers only' "$work/said" || fail "Ray asks for no token"
    [ "$(stat -c %a "$home/.ray/auth_token")" = 600 ] || fail "others may read Ray's token"
    echo '$ curl http://127.0.0.1:8000/v1/chat/completions ...'
    answer=$(curl -sS --fail-with-body --max-time 120 http://127.0.0.1:8000/v1/chat/completions \
        -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}')
    echo "$answer"
    [[ $answer == *'"content":"'[^\"]* ]] || fail "no answer in that"
    run "$ray" down cluster.yaml --yes
    local deadline=$((SECONDS + 30)) left
    while left=$(pgrep -af 'raylet|gcs_server|ray::|VLLM::|deployments\.node\.lmcache_main'); do
        [ $SECONDS -lt $deadline ] || fail "ray down left these: $left"
        sleep 1
    done
    echo "test-cluster: passed after $SECONDS s; nothing is left running"
}

if [ "${1:-}" = inside ]; then
    inside "$2"
else
    require
    work=$(mktemp -d /var/tmp/conserve-cluster-XXXXXX)
    trap 'rm -rf "$work"' EXIT
    unshare --mount --pid --fork --mount-proc --kill-child "${BASH_SOURCE[0]}" inside "$work"
fi
