// A hostile program with a connection of the overlay. It tries to learn about the host through the
// connection's socket, and to use the socket in ways that are forbidden to a container.
//
// It makes raw system calls and is statically linked. Each attempt prints one line: its name, a
// tab, the outcome. attempts.md has the list of attempts, with the mechanism that stops each.
//
//     attack connect|accept OWN PEER HOSTS DEVICE PASS   connects, tries everything, passes its socket on
//     attack given OWN PEER HOSTS DEVICE PASS            receives the socket, tries everything
//     attack inherited NUMBER                            makes one attempt after exec
//
// OWN and PEER are overlay addresses of either family. HOSTS is the common prefix of all hosts'
// addresses. DEVICE is a device of the host.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/ethtool.h>
#include <linux/filter.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TCP_LEVEL 6

static const char *own, *peer, *hosts, *device, *self;
static unsigned char hosts_bytes[6];
static size_t hosts_len;
// AF_INET or AF_INET6, as in the overlay.
static int family;
static int s;
// The priority that the program has set. An accepted socket does not inherit that of its listening
// socket.
static int priority = 2;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void say(const char *name, const char *outcome)
{
	printf("%s\t%s\n", name, outcome);
	fflush(stdout);
}

// Returns whether `bytes` contain a host's address: in network order, in this machine's order, or
// as text.
static int shows(const void *bytes, size_t len)
{
	unsigned char turned[sizeof hosts_bytes];
	// /proc shows an address in words. Only the first word is searched for.
	size_t word = hosts_len < 4 ? hosts_len : 4;
	char hex[16], plain[16];

	for (size_t i = 0; i < hosts_len; i++)
		turned[i] = hosts_bytes[hosts_len - 1 - i];
	for (size_t i = 0; i < word; i++) {
		snprintf(hex + 2 * i, 3, "%02X", hosts_bytes[word - 1 - i]);
		snprintf(plain + 2 * i, 3, "%02x", hosts_bytes[i]);
	}
	return memmem(bytes, len, hosts_bytes, hosts_len) || memmem(bytes, len, turned, hosts_len) ||
	       memmem(bytes, len, hex, 2 * word) || memmem(bytes, len, plain, 2 * word) ||
	       memmem(bytes, len, hosts, strlen(hosts));
}

// Fills in an address of the overlay's family. Without `text`, it is the wildcard address.
static socklen_t address(struct sockaddr_storage *at, const char *text, int port)
{
	memset(at, 0, sizeof *at);
	at->ss_family = family;
	if (family == AF_INET) {
		struct sockaddr_in *v4 = (struct sockaddr_in *)at;
		v4->sin_port = htons(port);
		if (text)
			inet_pton(AF_INET, text, &v4->sin_addr);
		return sizeof *v4;
	}
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)at;
	v6->sin6_port = htons(port);
	if (text)
		inet_pton(AF_INET6, text, &v6->sin6_addr);
	return sizeof *v6;
}

static const char *error(void)
{
	const char *name = strerrorname_np(errno);

	return name ? name : "an unknown error";
}

// Returns the outcome of a call that has returned `result` and may have written `bytes`.
static const char *outcome(long result, const void *bytes, size_t len, const char *otherwise)
{
	if (result < 0)
		return error();
	return bytes && shows(bytes, len) ? "THE HOST'S ADDRESS" : otherwise;
}

static const char *whose(const struct sockaddr_storage *at)
{
	static char text[INET6_ADDRSTRLEN];
	const char *plain = text;

	if (at->ss_family == AF_INET)
		inet_ntop(AF_INET, &((struct sockaddr_in *)at)->sin_addr, text, sizeof text);
	else
		inet_ntop(AF_INET6, &((struct sockaddr_in6 *)at)->sin6_addr, text, sizeof text);
	if (!strncmp(plain, "::ffff:", 7))
		plain += 7;
	if (!strcmp(plain, own))
		return "its own overlay address";
	if (!strcmp(plain, peer))
		return "its peer's overlay address";
	if (!strncmp(plain, hosts, strlen(hosts)))
		return "THE HOST'S ADDRESS";
	return plain;
}

static const char *name_of(int fd)
{
	struct sockaddr_storage at = {0};
	socklen_t len = sizeof at;

	return syscall(SYS_getsockname, fd, &at, &len) ? error() : whose(&at);
}

static void set(const char *name, int level, int option, const void *value, socklen_t len)
{
	say(name, syscall(SYS_setsockopt, s, level, option, value, len) ? error() : "DONE");
}

static void set_number(const char *name, int level, int option, int value)
{
	set(name, level, option, &value, sizeof value);
}

static const char *mark(int fd)
{
	int value = 7;

	return syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_MARK, &value, sizeof value) ? error() : "DONE";
}

static void ask_number(const char *name, int level, int option)
{
	int value = -1;
	socklen_t len = sizeof value;
	char text[32];

	if (syscall(SYS_getsockopt, s, level, option, &value, &len))
		return say(name, error());
	snprintf(text, sizeof text, "%d", value);
	say(name, text);
}

static void ask_bytes(const char *name, int level, int option, const char *otherwise)
{
	char bytes[512] = {0};
	socklen_t len = sizeof bytes;
	long result = syscall(SYS_getsockopt, s, level, option, bytes, &len);

	say(name, outcome(result, bytes, len, otherwise));
}

// Asks for an option that IPv6 has too, under another number. An IPv6 socket answers both.
static void ask_bytes_of_both(const char *name, int option, int option6, const char *otherwise)
{
	char bytes[512] = {0};
	socklen_t len = sizeof bytes;

	if (family == AF_INET6 && !syscall(SYS_getsockopt, s, IPPROTO_IPV6, option6, bytes, &len) && shows(bytes, len))
		say(name, "THE HOST'S ADDRESS");
	else
		ask_bytes(name, IPPROTO_IP, option, otherwise);
}

static void copies(void)
{
	int status, pair[2], copy = dup(s);
	char path[64], number[16];
	ssize_t got;

	say("dup, then SO_MARK", mark(copy));
	close(copy);
	fflush(stdout);
	if (!fork()) {
		say("fork, then SO_MARK", mark(s));
		_exit(0);
	}
	wait(&status);
	if (!fork()) {
		snprintf(number, sizeof number, "%d", dup(s));
		execl(self, self, "inherited", number, NULL);
		_exit(1);
	}
	wait(&status);
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		die("socketpair");
	char space[CMSG_SPACE(sizeof(int))] = {0}, byte = 0;
	struct iovec part = {&byte, 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
	struct cmsghdr *control = CMSG_FIRSTHDR(&message);

	control->cmsg_level = SOL_SOCKET, control->cmsg_type = SCM_RIGHTS, control->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(control), &s, sizeof s);
	if (sendmsg(pair[0], &message, 0) != 1 || recvmsg(pair[1], &message, 0) != 1)
		die("SCM_RIGHTS");
	memcpy(&copy, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof copy);
	say("SCM_RIGHTS, then SO_MARK", mark(copy));
	say("SCM_RIGHTS, then getsockname", name_of(copy));
	close(copy);
	int pidfd = syscall(SYS_pidfd_open, getpid(), 0);
	copy = syscall(SYS_pidfd_getfd, pidfd, s, 0);
	say("pidfd_getfd, then SO_MARK", copy < 0 ? error() : mark(copy));
	close(copy);
	snprintf(path, sizeof path, "/proc/self/fd/%d", s);
	char target[256] = {0};
	got = readlink(path, target, sizeof target - 1);
	say("readlink of /proc/self/fd", outcome(got, target, sizeof target, "nothing of the host"));
	say("open of /proc/self/fd", open(path, O_RDWR) < 0 ? error() : "DONE");
}

static void files(void)
{
	static char text[1 << 20];
	const char *names[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6", "/proc/self/net/unix", "/proc/self/net/fib_trie",
			       "/proc/self/net/if_inet6", "/proc/self/net/ipv6_route", "/proc/self/net/arp", "/proc/self/net/sockstat", "/proc/self/mountinfo"};
	const char *result = "nothing of the host";

	for (unsigned i = 0; i <= sizeof names / sizeof *names; i++) {
		char path[64];
		snprintf(path, sizeof path, "/proc/self/fdinfo/%d", s);
		int file = open(i < sizeof names / sizeof *names ? names[i] : path, O_RDONLY);
		ssize_t len = 0, more;

		while (file >= 0 && (more = read(file, text + len, sizeof text - len)) > 0)
			len += more;
		close(file);
		if (len && shows(text, len))
			result = "THE HOST'S ADDRESS";
	}
	say("/proc/self/net and fdinfo", result);
}

static void diag(void)
{
	static char answer[1 << 16];
	int socket_of_diag = socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG);
	const char *result = "nothing of the host";

	for (int family = AF_INET; family <= AF_INET6; family += AF_INET6 - AF_INET) {
		struct {
			struct nlmsghdr head;
			struct inet_diag_req_v2 ask;
		} wanted = {{sizeof wanted, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 0, 0},
			    {.sdiag_family = family, .sdiag_protocol = TCP_LEVEL, .idiag_states = -1, .idiag_ext = 0xff}};
		if (send(socket_of_diag, &wanted, sizeof wanted, 0) < 0)
			die("sock_diag");
		for (int done = 0; !done;) {
			ssize_t len = recv(socket_of_diag, answer, sizeof answer, 0);
			if (len <= 0)
				die("sock_diag's answer");
			if (shows(answer, len))
				result = "THE HOST'S ADDRESS";
			done = ((struct nlmsghdr *)answer)->nlmsg_type != SOCK_DIAG_BY_FAMILY;
		}
	}
	close(socket_of_diag);
	say("sock_diag", result);
}

static void interfaces(void)
{
	char room[4096];
	struct ifconf all = {.ifc_len = sizeof room, .ifc_buf = room};
	struct ifreq one = {0};
	struct ethtool_drvinfo driver = {.cmd = ETHTOOL_GDRVINFO};
	struct arpreq arp = {0};
	long result = syscall(SYS_ioctl, s, SIOCGIFCONF, &all);

	say("SIOCGIFCONF", outcome(result, room, result < 0 ? 0 : all.ifc_len, "the container's interfaces"));
	strcpy(one.ifr_name, device);
	say("SIOCGIFADDR", outcome(syscall(SYS_ioctl, s, SIOCGIFADDR, &one), &one, sizeof one, "an address"));
	say("SIOCGIFHWADDR", syscall(SYS_ioctl, s, SIOCGIFHWADDR, &one) ? error() : "THE HOST'S DEVICE");
	say("SIOCGIFINDEX", syscall(SYS_ioctl, s, SIOCGIFINDEX, &one) ? error() : "THE HOST'S DEVICE");
	one.ifr_data = (char *)&driver;
	say("SIOCETHTOOL", syscall(SYS_ioctl, s, SIOCETHTOOL, &one) ? error() : "THE HOST'S DEVICE");
	((struct sockaddr_in *)&arp.arp_pa)->sin_family = AF_INET;
	strcpy(arp.arp_dev, device);
	say("SIOCGARP", syscall(SYS_ioctl, s, SIOCGARP, &arp) ? error() : "THE HOST'S DEVICE");
	int namespace = syscall(SYS_ioctl, s, SIOCGSKNS, 0);
	say("SIOCGSKNS", namespace < 0 ? error() : "THE HOST'S NAMESPACE");
	if (namespace >= 0)
		close(namespace);
	int other = syscall(SYS_ioctl, s, SIOCATMARK, &one);
	say("SIOCATMARK", other ? error() : "of the connection");
}

static int swapped, fresh_one;
static volatile int is_over;

static void *swap(void *unused)
{
	while (!is_over) {
		dup2(s, swapped);
		dup2(fresh_one, swapped);
	}
	return unused;
}

// Another thread replaces one of the container's sockets by the host's socket, as often as
// possible.
static void races(void)
{
	char room[4096];
	const char *result = "the container's interfaces";
	pthread_t other;
	struct timespec now;

	fresh_one = socket(AF_INET, SOCK_DGRAM, 0), swapped = dup(fresh_one);
	if (pthread_create(&other, NULL, swap, NULL))
		die("a thread");
	clock_gettime(CLOCK_MONOTONIC, &now);
	for (time_t end = now.tv_sec + 2; now.tv_sec < end; clock_gettime(CLOCK_MONOTONIC, &now)) {
		struct ifconf all = {.ifc_len = sizeof room, .ifc_buf = room};
		if (!syscall(SYS_ioctl, swapped, SIOCGIFCONF, &all) && shows(room, all.ifc_len))
			result = "THE HOST'S ADDRESS";
	}
	is_over = 1;
	pthread_join(other, NULL);
	close(swapped), close(fresh_one);
	say("SIOCGIFCONF while the descriptor is swapped", result);
}

static struct sockaddr_storage flipped;

static void *flip(void *unused)
{
	volatile sa_family_t *at = &flipped.ss_family;

	while (!is_over) {
		*at = AF_UNSPEC;
		*at = family;
	}
	return unused;
}

// Another thread changes the family of the address as often as possible, while the socket is
// connected to it.
static void disconnects(const struct sockaddr *to, socklen_t len)
{
	const char *result = "EPERM or EISCONN";
	pthread_t other;

	memcpy(&flipped, to, len), is_over = 0;
	if (pthread_create(&other, NULL, flip, NULL))
		die("a thread");
	for (int times = 0; times < 2000; times++) {
		struct sockaddr_storage at;
		socklen_t at_len = sizeof at;
		if (!syscall(SYS_connect, s, &flipped, len) || syscall(SYS_getpeername, s, &at, &at_len))
			result = "disconnected";
		else if (errno && errno != EPERM && errno != EISCONN)
			result = error();
	}
	is_over = 1;
	pthread_join(other, NULL);
	say("connect while the family becomes AF_UNSPEC", result);
}

static void options(void)
{
	struct timeval limit = {5, 0};
	struct sock_filter step = BPF_STMT(BPF_RET | BPF_K, 0xffff);
	struct sock_fprog filter = {1, &step};
	char md5[216] = {0};
	int one = 1;

	set_number("set SO_MARK", SOL_SOCKET, SO_MARK, 7);
	set_number("set SO_PRIORITY to 7", SOL_SOCKET, SO_PRIORITY, 7);
	set_number("set SO_MAX_PACING_RATE", SOL_SOCKET, SO_MAX_PACING_RATE, -1);
	set("set SO_BINDTODEVICE", SOL_SOCKET, SO_BINDTODEVICE, device, strlen(device));
	set_number("set SO_BINDTOIFINDEX", SOL_SOCKET, 62, 2);
	set_number("set TCP_REPAIR", TCP_LEVEL, 19, 1);
	set_number("set TCP_ULP", TCP_LEVEL, 31, 0x736c74);
	set("set TCP_MD5SIG", TCP_LEVEL, 14, md5, sizeof md5);
	set_number("set TCP_SAVE_SYN", TCP_LEVEL, 27, 1);
	set_number("set TCP_FASTOPEN_CONNECT", TCP_LEVEL, 30, 1);
	set_number("set IP_PKTINFO", IPPROTO_IP, IP_PKTINFO, 1);
	set_number("set IP_RECVERR", IPPROTO_IP, IP_RECVERR, 1);
	set_number("set IP_RECVORIGDSTADDR", IPPROTO_IP, 20, 1);
	set_number("set IP_TRANSPARENT", IPPROTO_IP, IP_TRANSPARENT, 1);
	set_number("set IP_FREEBIND", IPPROTO_IP, IP_FREEBIND, 1);
	set_number("set IP_TTL", IPPROTO_IP, IP_TTL, 3);
	set("set IP_OPTIONS", IPPROTO_IP, IP_OPTIONS, "\x07\x07\x04\0\0\0\0", 8);
	set_number("set IPV6_RECVPKTINFO", IPPROTO_IPV6, 49, 1);
	set_number("set SO_TIMESTAMPING", SOL_SOCKET, SO_TIMESTAMPING, 0x1 << 8 | 0x10);
	set_number("set SO_ZEROCOPY", SOL_SOCKET, SO_ZEROCOPY, 1);
	set("set SO_TXTIME", SOL_SOCKET, 61, "\0\0\0\0\0\0\0", 8);
	set_number("set SO_REUSEPORT", SOL_SOCKET, SO_REUSEPORT, 1);
	set_number("set SO_BUSY_POLL", SOL_SOCKET, 46, 0);
	set("set SO_ATTACH_FILTER", SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
	set("set TCP_NODELAY, SO_RCVTIMEO", TCP_LEVEL, 1, &one, sizeof one);
	if (syscall(SYS_setsockopt, s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit))
		die("SO_RCVTIMEO");

	ask_number("ask SO_MARK", SOL_SOCKET, SO_MARK);
	int told = -1;
	socklen_t length = sizeof told;
	syscall(SYS_getsockopt, s, SOL_SOCKET, SO_PRIORITY, &told, &length);
	say("ask SO_PRIORITY", told == priority ? "its own" : "ANOTHER'S");
	ask_number("ask IP_TOS", IPPROTO_IP, IP_TOS);
	set("set IP_TOS", IPPROTO_IP, IP_TOS, "\xb8", 1);
	ask_number("ask IP_TOS after that", IPPROTO_IP, IP_TOS);
	set_number("set SO_PRIORITY to 4", SOL_SOCKET, SO_PRIORITY, 4);
	ask_number("ask SO_PRIORITY after that", SOL_SOCKET, SO_PRIORITY);
	set_number("set IPV6_TCLASS", IPPROTO_IPV6, IPV6_TCLASS, 0x48);
	ask_number("ask SO_MAX_PACING_RATE", SOL_SOCKET, SO_MAX_PACING_RATE);
	ask_number("ask SO_INCOMING_NAPI_ID", SOL_SOCKET, SO_INCOMING_NAPI_ID);
	ask_number("ask SO_BINDTOIFINDEX", SOL_SOCKET, 62);
	ask_bytes("ask SO_PEERCRED", SOL_SOCKET, SO_PEERCRED, "nobody");
	ask_bytes_of_both("ask SO_ORIGINAL_DST", 80, 80, "zeroes");
	ask_bytes_of_both("ask IP_PKTOPTIONS", IP_PKTOPTIONS, 6, "nothing of the host");
	ask_bytes("ask TCP_SAVED_SYN", TCP_LEVEL, 28, "nothing of the host");
	ask_bytes("ask TCP_INFO", TCP_LEVEL, 11, "nothing of the host");
	uint64_t its = -1, ours = -1;
	socklen_t len = sizeof its;
	int fresh = socket(AF_INET, SOCK_STREAM, 0);
	if (syscall(SYS_getsockopt, fresh, SOL_SOCKET, 71, &ours, &len) ||
	    syscall(SYS_getsockopt, s, SOL_SOCKET, 71, &its, &len))
		die("SO_NETNS_COOKIE");
	close(fresh);
	say("ask SO_NETNS_COOKIE", its == ours ? "the container's" : its == 0 ? "0" : "THE HOST'S NAMESPACE");
}

// Sends with a control message. The peer echoes the byte.
static long send_with(int level, int type, uint32_t value)
{
	char space[CMSG_SPACE(sizeof value)] = {0};
	struct iovec part = {"x", 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
	struct cmsghdr *control = CMSG_FIRSTHDR(&message);

	control->cmsg_level = level, control->cmsg_type = type, control->cmsg_len = CMSG_LEN(sizeof value);
	memcpy(CMSG_DATA(control), &value, sizeof value);
	return syscall(SYS_sendmsg, s, &message, 0);
}

static void messages(void)
{
	char bytes[2048], controls[2048], from[128];
	struct iovec part = {bytes, sizeof bytes};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = controls, .msg_controllen = sizeof controls,
				 .msg_name = from, .msg_namelen = sizeof from};
	struct sockaddr_storage elsewhere;
	socklen_t len = address(&elsewhere, family == AF_INET ? "127.0.0.1" : "::1", 1);
	long result;

	say("sendmsg with IP_TOS", send_with(IPPROTO_IP, IP_TOS, 0xb8) < 0 ? error() : "sent as ever");
	say("sendmsg with SO_MARK", send_with(SOL_SOCKET, SO_MARK, 7) < 0 ? error() : "sent as ever");
	result = syscall(SYS_sendto, s, "x", 1, 0, &elsewhere, len);
	say("sendto elsewhere", result < 0 ? error() : "sent to its peer");
	result = syscall(SYS_sendto, s, "x", 1, MSG_FASTOPEN, &elsewhere, len);
	say("sendto elsewhere with MSG_FASTOPEN", result < 0 ? error() : "DONE");
	// The kernel keeps the packet with its headers, to report when it was sent.
	if (send_with(SOL_SOCKET, SO_TIMESTAMPING, 1 << 8) < 0)
		die("SO_TIMESTAMPING");
	usleep(100000);
	result = syscall(SYS_recvmsg, s, &message, MSG_ERRQUEUE | MSG_DONTWAIT);
	say("SO_TIMESTAMPING by sendmsg, then recvmsg with MSG_ERRQUEUE",
	    outcome(result, bytes, result < 0 ? 0 : result, "a packet"));
	result = syscall(SYS_recvfrom, s, bytes, sizeof bytes, MSG_ERRQUEUE | MSG_DONTWAIT, NULL, NULL);
	say("recvfrom with MSG_ERRQUEUE", outcome(result, bytes, result < 0 ? 0 : result, "a packet"));
	memset(from, 0, sizeof from);
	message.msg_controllen = sizeof controls;
	result = syscall(SYS_recvmsg, s, &message, 0);
	int is_told = shows(from, sizeof from) || (result > 0 && shows(controls, message.msg_controllen));
	say("recvmsg with room for everything", result <= 0 ? "NOTHING CAME" : is_told ? "THE HOST'S ADDRESS" : "the bytes");
	struct sock_filter step = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog filter = {1, &step};
	int listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter);
	say("a supervisor of its own", listener < 0 ? error() : "a listener");
	if (listener >= 0)
		close(listener);
	say("an answer to a supervisor's listener", syscall(SYS_ioctl, s, 0xc0182101ul, bytes) ? error() : "DONE");
	int ring = syscall(SYS_io_uring_setup, 4, (char[128]){0});
	say("io_uring_setup", ring < 0 ? error() : "a ring");
	if (ring >= 0)
		close(ring);
}

#ifdef __x86_64__
// Makes a system call with the 32-bit ABI. Its arguments have to be below 4 GB.
static long compat(long number, long a, long b, long c, long d, long e)
{
	long result;

	asm volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c), "S"(d), "D"(e) : "memory", "r8", "r9", "r10", "r11");
	if ((int)result < 0) {
		errno = -(int)result;
		return -1;
	}
	return (int)result;
}

static void other_abi(void)
{
	char *low = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	uint32_t *words = (uint32_t *)low;
	struct sockaddr_storage at;
	long result;

	if (low == MAP_FAILED)
		die("memory below 4 GB");
	words[0] = 5;
	say("int 0x80: set SO_PRIORITY", compat(366, s, SOL_SOCKET, SO_PRIORITY, (long)low, 4) < 0 ? error() : "DONE");
	uint32_t call[5] = {s, SOL_SOCKET, SO_PRIORITY, (uint32_t)(long)low, 4};
	memcpy(words + 16, call, sizeof call);
	say("int 0x80: set SO_PRIORITY by socketcall", compat(102, 14, (long)(words + 16), 0, 0, 0) < 0 ? error() : "DONE");
	words[0] = sizeof at;
	result = compat(367, s, (long)(words + 1), (long)words, 0, 0);
	memcpy(&at, words + 1, sizeof at);
	say("int 0x80: getsockname", result < 0 ? error() : whose(&at));
	words[0] = 4096, words[1] = (uint32_t)(long)(low + 8192);
	result = compat(54, s, SIOCGIFCONF, (long)low, 0, 0);
	say("int 0x80: SIOCGIFCONF", outcome(result, low + 8192, result < 0 ? 0 : words[0], "interfaces"));
	result = compat(371, s, (long)(low + 8192), 2048, MSG_ERRQUEUE | MSG_DONTWAIT, 0);
	say("int 0x80: recvfrom with MSG_ERRQUEUE", outcome(result, low + 8192, result < 0 ? 0 : result, "a packet"));
	result = syscall(0x40000000 | 55, s, SOL_SOCKET, SO_PRIORITY, low, low + 64);
	say("x32: ask SO_PRIORITY", result < 0 ? error() : "DONE");
	munmap(low, 65536);
}
#endif

static void anew(const char *when, const struct sockaddr *to, socklen_t len)
{
	char name[64];
	struct sockaddr_storage here;
	socklen_t here_len = address(&here, NULL, 0);

	snprintf(name, sizeof name, "connect%s", when);
	say(name, syscall(SYS_connect, s, to, len) ? error() : "DONE");
	snprintf(name, sizeof name, "bind%s", when);
	say(name, syscall(SYS_bind, s, &here, here_len) ? error() : "DONE");
	snprintf(name, sizeof name, "sendto with MSG_FASTOPEN%s", when);
	if (*when)
		say(name, syscall(SYS_sendto, s, "x", 1, MSG_FASTOPEN, to, len) < 0 ? error() : "DONE");
	snprintf(name, sizeof name, "listen%s", when);
	say(name, syscall(SYS_listen, s, 1) ? error() : "listens, to nobody");
	snprintf(name, sizeof name, "accept%s", when);
	int flags = fcntl(s, F_GETFL);
	fcntl(s, F_SETFL, flags | O_NONBLOCK);
	say(name, syscall(SYS_accept, s, NULL, NULL) < 0 ? error() : "DONE");
	fcntl(s, F_SETFL, flags);
	snprintf(name, sizeof name, "getsockname%s", when);
	say(name, name_of(s));
}

static void attempts(void)
{
	struct sockaddr_storage at = {0}, to;
	socklen_t len = sizeof at, to_len;
	struct sockaddr_in nowhere = {.sin_family = AF_UNSPEC};
	char text[64];

	snprintf(text, sizeof text, "%s%s1", family == AF_INET6 && !strchr(hosts, ':') ? "::ffff:" : "", hosts);
	to_len = address(&to, text, 22);
	say("getpeername", syscall(SYS_getpeername, s, &at, &len) ? error() : whose(&at));
	len = address(&at, NULL, 0);
	say("ask SO_PEERNAME", syscall(SYS_getsockopt, s, SOL_SOCKET, 28, &at, &len) ? error() : whose(&at));
	copies();
	files();
	diag();
	interfaces();
	races();
	options();
	messages();
#ifdef __x86_64__
	other_abi();
#endif
	anew("", (struct sockaddr *)&to, to_len);
	say("connect to AF_UNSPEC", syscall(SYS_connect, s, &nowhere, sizeof nowhere) ? error() : "disconnected");
	anew(" after AF_UNSPEC", (struct sockaddr *)&to, to_len);
	disconnects((struct sockaddr *)&to, to_len);
}

static void connection(int accepts)
{
	struct sockaddr_storage at;
	socklen_t len = address(&at, accepts ? NULL : peer, 9000);
	int one = 1, tos = 8;

	if ((s = socket(family, SOCK_STREAM, 0)) < 0)
		die("socket");
	// The program sets its own options, before the router moves the connection.
	if (setsockopt(s, IPPROTO_IP, IP_TOS, &tos, sizeof tos) || setsockopt(s, SOL_SOCKET, SO_PRIORITY, &priority, sizeof priority))
		die("its own options");
	if (!accepts) {
		if (connect(s, (struct sockaddr *)&at, len))
			die("connect");
		return;
	}
	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(s, (struct sockaddr *)&at, len) || listen(s, 5))
		die("listen");
	puts("listening"), fflush(stdout);
	int accepted = accept(s, NULL, NULL);
	if (accepted < 0)
		die("accept");
	close(s);
	s = accepted;
	priority = 0;
}

// Passes the socket to another program in the same container, or receives it.
static int meeting(const char *path, int gives)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	int meeting = socket(AF_UNIX, SOCK_STREAM, 0);
	char space[CMSG_SPACE(sizeof(int))] = {0}, byte = 0;
	struct iovec part = {&byte, 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
	struct cmsghdr *control = CMSG_FIRSTHDR(&message);

	strncpy(at.sun_path, path, sizeof at.sun_path - 1);
	if (gives) {
		if (connect(meeting, (struct sockaddr *)&at, sizeof at))
			die("nobody to give it to");
		control->cmsg_level = SOL_SOCKET, control->cmsg_type = SCM_RIGHTS, control->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(control), &s, sizeof s);
		return sendmsg(meeting, &message, 0) == 1 ? 0 : -1;
	}
	if (bind(meeting, (struct sockaddr *)&at, sizeof at) || listen(meeting, 1))
		die("meeting");
	puts("waiting"), fflush(stdout);
	int from = accept(meeting, NULL, NULL);
	if (from < 0 || recvmsg(from, &message, 0) != 1)
		die("nothing is given");
	memcpy(&s, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof s);
	return 0;
}

int main(int count, char **words)
{
	self = words[0];
	signal(SIGPIPE, SIG_IGN);
	if (count == 3 && !strcmp(words[1], "inherited")) {
		say("exec, then SO_MARK", mark(atoi(words[2])));
		return 0;
	}
	if (count != 7)
		return 2;
	own = words[2], peer = words[3], hosts = words[4], device = words[5];
	family = strchr(own, ':') ? AF_INET6 : AF_INET;
	unsigned char whole[16];
	char text[64];
	snprintf(text, sizeof text, "%s1", hosts);
	hosts_len = strchr(hosts, ':') ? 6 : 3;
	if (inet_pton(hosts_len == 6 ? AF_INET6 : AF_INET, text, whole) != 1)
		return 2;
	memcpy(hosts_bytes, whole, hosts_len);
	if (!strcmp(words[1], "given")) {
		meeting(words[6], 0);
	} else {
		connection(!strcmp(words[1], "accept"));
		if (strcmp(words[6], "-"))
			return meeting(words[6], 1);
	}
	say("getsockname", name_of(s));
	attempts();
	puts("done");
	return 0;
}
