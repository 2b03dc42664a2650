#!/usr/bin/env bash
# Install the sdist's wheel with the extra `cpu` in a fresh environment, and then the sdist itself,
# and run both from a folder that is no clone: `make test-wheel`. pip fetches some 4 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath -s "${1:-.venv/bin/python}")
folder=$(mktemp -d "${TMPDIR:-/tmp}/conserve-wheel.XXXXXX")
trap 'rm -rf "$folder"' EXIT
say() { echo "test-wheel: $*"; }

say "building in $folder"
# A build leaves files in its folder, so it has one of its own, with this folder's files.
git clone --quiet . "$folder/source"
git ls-files -z --cached --others --exclude-standard \
    | tar --create --null --files-from - --ignore-failed-read | tar --extract --directory "$folder/source"
(cd "$folder/source" && "$python" setup.py --quiet sdist --dist-dir "$folder")
sdist=$(echo "$folder"/*.tar.gz)
"$python" -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir "$folder" "$sdist"
wheel=$(echo "$folder"/*.whl)

# The tested versions. Beside torch's CPU build, what is built with torch has to be for CPUs, too;
# where only PyTorch's own index lacks here, empty packages stand in for its builds of these.
sed -n 's/^\([A-Za-z0-9][^ ]*==[^ ]*\).*/\1/p' requirements-cpu.txt > "$folder/pins.txt"
for pin in torchvision==0.28.0+cpu torchaudio==2.11.0+cpu torchcodec==0.17.0+cpu; do
    echo "$pin" >> "$folder/pins.txt"
    if ! "$python" -m pip download -qq --no-deps --dest "$folder" "$pin" 2> /dev/null; then
        say "no index has $pin; an empty package stands in for it"
        "$python" -c "import sys; from pathlib import Path
from tests.unit.stand_in_python import write_wheel
write_wheel(Path(sys.argv[1]), *sys.argv[2].split('=='))" "$folder" "$pin"
    fi
done

say "installing $(basename "$wheel")[cpu,nodes]"
"$python" -m venv "$folder/env"
pip=("$folder/env/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -qq --find-links "$folder" --constraint "$folder/pins.txt" "$wheel[cpu,nodes]"

mkdir "$folder/elsewhere"
cd "$folder/elsewhere"
unset PYTHONPATH VIRTUAL_ENV
conserve=$folder/env/bin/conserve
check() {
    say "pip check, --version, serve --plan, doctor with the $1"
    "${pip[@]}" check
    "$conserve" --version | tee version
    grep -qx "build wheel" version
    "$conserve" serve --plan device=cpu
    "$conserve" doctor device=cpu
}
check wheel
"$conserve" demo device=cpu
"${pip[@]}" install -qq --no-deps --no-build-isolation --force-reinstall "$sdist"
check sdist
say "all of it runs"
