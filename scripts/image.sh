#!/usr/bin/env bash
# Build the image of deploy/Containerfile, by podman or docker, and print its layers: `make image`.
# Variables: TARGET (cpu, cuda), BUILDER, BASE, and PIP_CONFIG_FILE for pip in the build. Arguments
# are for `podman build` or `docker build`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${TARGET:-cpu}
builder=${BUILDER:-$(command -v podman || command -v docker)} || {
    echo "conserve: podman or docker is needed (Debian: podman)." >&2
    exit 1
}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' conserve/__init__.py)
commit=$(git describe --always --abbrev=12 --exclude='*' --dirty)
image=conserve:$version
[ "$target" = cuda ] || image=$image-$target
options=(--file deploy/Containerfile --target "$target" --tag "$image" --build-arg "COMMIT=$commit"
    --label "org.opencontainers.image.revision=$commit"
    --label "org.opencontainers.image.version=$version"
    --build-arg http_proxy --build-arg https_proxy --build-arg no_proxy)
[ -z "${BASE:-}" ] || options+=(--build-arg "BASE=$BASE")
[ -z "${PIP_CONFIG_FILE:-}" ] || options+=(--secret "id=pip,src=$PIP_CONFIG_FILE")
# The format of OCI has no HEALTHCHECK.
[[ $builder != *podman* ]] || options+=(--format docker)

context=$(mktemp -d "${TMPDIR:-/tmp}/conserve-image.XXXXXX")
trap 'rm -rf "$context"' EXIT
git ls-files -z | xargs -0 cp --parents -t "$context"
"$builder" build "${options[@]}" "$@" "$context"

echo
"$builder" image inspect --format "$image, $commit: {{.Size}} bytes, in layers, the newest first:" "$image"
"$builder" history --no-trunc --format '{{.Size}}|{{.CreatedBy}}' "$image" |
    while IFS='|' read -r size made; do
        case $made in
            *": '"*) made=${made#*: \'} what=${made%%\'*} ;;
            *COPY*/installed*|*COPY*/opt/conserve\ *) what="ConServe" ;;
            *COPY*) what="the pinned versions, with hashes" ;;
            *) what="the base, ${BASE:-debian:12-slim}" ;;
        esac
        [[ $size == 0\ B || $size == 0B ]] || printf '%12s  %s\n' "$size" "$what"
    done
