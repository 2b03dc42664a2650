#!/bin/bash
# enter.sh ROOT USER FOLDER COMMAND...: run a command of an image as Docker does with --read-only,
# --cap-drop=all and --tmpfs /tmp:exec: it is process 1, and has 64 MiB of shared memory, a network of
# its own, and the volumes FOLDER/models and FOLDER/kv. It needs root.
set -e
if [ "$1" != inside ]; then
    exec unshare --mount --net --ipc --pid --fork --kill-child "$0" inside "$@"
fi
root=$2 user=$3 folder=$4
shift 4
mkdir -p "$folder/models" "$folder/kv"
chown "$user:$user" "$folder/models" "$folder/kv"
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
cd "$root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
for one in null zero full random urandom; do touch dev/$one; mount --bind /dev/$one dev/$one; done
ln -s /proc/self/fd dev/fd
mkdir dev/shm
mount -t tmpfs -o mode=1777,size=64m tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
mount --bind "$folder/models" models
mount --bind "$folder/kv" kv
ip link set lo up
exec chroot . setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all "$@"
