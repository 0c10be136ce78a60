# Runs typical servers behind an exit: a web server, sshd and PostgreSQL, all at 10.3.0.2. Prints
# "up" when they answer, and ends with its input.
set -eu
cd "$1"
PATH="$PATH:/usr/sbin:$(echo /usr/lib/postgresql/*/bin)"
mkdir www data
chmod 755 .
head -c 5000000 /dev/urandom > www/file
python3 -m http.server 80 --bind 10.3.0.2 --directory www > http.log 2>&1 &
for key in host_key user_key; do ssh-keygen -q -t ed25519 -N '' -f "$key"; done
cat > sshd_config <<CONFIG
Port 22
ListenAddress 10.3.0.2
HostKey $PWD/host_key
PidFile none
AuthorizedKeysFile $PWD/user_key.pub
StrictModes no
PermitRootLogin yes
CONFIG
# sshd needs an empty directory, which is in a new /run.
unshare --mount sh -c 'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$0" -D -e -f sshd_config' \
    "$(command -v sshd)" 2> sshd.log &
chown postgres data
as_postgres() { setpriv --reuid postgres --regid postgres --clear-groups "$@"; }
as_postgres initdb --auth trust --no-sync --username postgres --pgdata data > initdb.log
echo "host all all 0.0.0.0/0 trust" >> data/pg_hba.conf
as_postgres postgres -D data -c listen_addresses=10.3.0.2 -c unix_socket_directories= -c fsync=off 2> postgres.log &
for _ in $(seq 200); do
    if curl -sf -o /dev/null http://10.3.0.2/ && pg_isready -q -h 10.3.0.2 && ssh-keyscan 10.3.0.2 > known_hosts 2> /dev/null &&
        [ -s known_hosts ]; then
        echo up
        break
    fi
    sleep 0.1
done
cat > /dev/null
