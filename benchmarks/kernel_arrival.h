/* Forced into the mock's build by truth.py (gcc -include): when each request came to its socket, by the kernel's stamp,
   and when its first token was handed to the kernel.

   The mock stamps a request when it reads it and a token before it writes the event, so that what it was late itself
   would count as its client's error. Each request leaves a line in the file that KERNEL_ARRIVAL names, ns of the wall
   clock: its first bytes' arrival (-1 where the kernel gave no stamp), and the moment before the first token's `send`.
   A request begins with "POST"; a client sends no second one on a connection before it has the reply to the first. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define MOST_SOCKETS 65536

static long long stamp_ns(struct timespec at) { return at.tv_sec * 1000000000LL + at.tv_nsec; }

static long long arrived_ns[MOST_SOCKETS]; /* of requests without a token yet; 0 where there is none */

static int stamped(int fd) {
    int on = 1;
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
    return fd;
}

/* The listening socket too: the kernel begins to stamp packets when the first socket asks for it. */
static int stamped_listen(int fd, int backlog) { return listen(stamped(fd), backlog); }

static int stamped_accept(int fd, struct sockaddr *peer, socklen_t *size, int flags) {
    return stamped(accept4(fd, peer, size, flags));
}

static ssize_t stamped_recv(int fd, void *bytes, size_t size, int flags) {
    char control[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec piece = {bytes, size};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(fd, &message, flags);
    if (got < 4 || memcmp(bytes, "POST", 4))
        return got;
    struct timespec at = {0, -1};
    for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one))
        if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SO_TIMESTAMPNS)
            memcpy(&at, CMSG_DATA(one), sizeof at);
    arrived_ns[fd % MOST_SOCKETS] = stamp_ns(at);
    return got;
}

static ssize_t stamped_send(int fd, const void *bytes, size_t size, int flags) {
    static FILE *stamps;
    long long *arrived = &arrived_ns[fd % MOST_SOCKETS];
    if (*arrived && memmem(bytes, size, "data: ", 6)) {
        struct timespec now;
        if (!stamps && !(stamps = fopen(getenv("KERNEL_ARRIVAL"), "w")))
            exit(3);
        clock_gettime(CLOCK_REALTIME, &now);
        fprintf(stamps, "%lld %lld\n", *arrived, stamp_ns(now));
        *arrived = 0;
    }
    return send(fd, bytes, size, flags);
}

#define listen stamped_listen
#define accept4 stamped_accept
#define recv stamped_recv
#define send stamped_send
