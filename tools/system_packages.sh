#!/bin/sh
# Installs what the tests against real containers need, when root on Debian; elsewhere those tests skip and say why.
set -eu
missing=""
command -v lxc-start >/dev/null || missing="$missing lxc"
[ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
command -v ssh-keygen >/dev/null || missing="$missing openssh-client"
command -v ip >/dev/null || missing="$missing iproute2"
[ -x /lib/systemd/systemd ] || missing="$missing systemd dbus"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "note: not root on Debian, so tests that need$missing will skip" >&2
    exit 0
fi
echo "installing$missing" >&2
apt-get update -qq
# shellcheck disable=SC2086  # a list of words
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
