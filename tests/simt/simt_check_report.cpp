/* Names for what the checker found: places in the sources by addr2line, threads by their indices, memory by its allocation. */
#include "tests/simt/simt_check_private.h"
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <unistd.h>

namespace simt {
namespace check {

enum { FRAMES = 10, PLACES = 3 };

std::vector<void *> stack_now()
{
    void *frames[FRAMES + 2];
    const int n = backtrace(frames, FRAMES + 2);
    return std::vector<void *>(frames + (n > 2 ? 2 : 0), frames + n);
}

/* Files of the emulator itself say nothing about the code under test. */
static bool is_emulator(const char *file)
{
    return strstr(file, "tests/simt/simt_") == file || strstr(file, "/tests/simt/simt_") || strstr(file, "/cuda_runtime.h") || strstr(file, "/usr/include/") || strstr(file, "libc") == file || strstr(file, "/nptl/") || strstr(file, "/csu/") || *file == '?';
}

/* The file of a module. The program itself is known by its argv[0], which need not be a path; false: no name that a shell's quotes hold. */
static bool module_file(const Dl_info &info, char *ret_path, size_t room)
{
    ssize_t n = -1;
    if (info.dli_fname && access(info.dli_fname, R_OK) == 0)
        n = snprintf(ret_path, room, "%s", info.dli_fname);
    else
        n = readlink("/proc/self/exe", ret_path, room - 1);
    if (n < 0 || (size_t)n >= room)
        return false;
    ret_path[n] = 0;
    return !strpbrk(ret_path, "'\\");
}

/* Source lines of addresses of one module, as numbers that addr2line takes, the innermost first: more than one where functions were inlined. */
static void lines_in(const char *path, const std::string &addresses, std::vector<std::vector<std::string>> &ret_lines)
{
    char line[600];
    const std::string command = std::string("addr2line -a -i -e '") + path + "'" + addresses + " 2>/dev/null";
    FILE *out = popen(command.c_str(), "r");
    while (out && fgets(line, sizeof line, out)) {
        line[strcspn(line, " \n")] = 0;
        const char *name = strrchr(line, '/');
        if (strncmp(line, "0x", 2) == 0)
            ret_lines.emplace_back();
        else if (!ret_lines.empty() && !is_emulator(line))
            ret_lines.back().push_back(name ? name + 1 : line);
    }
    if (out)
        pclose(out);
}

/* The address as its module's file has it. Return addresses point behind the call. */
static std::string address_in_file(const void *pc, const Dl_info &info)
{
    char text[32];
    snprintf(text, sizeof text, " 0x%lx", (unsigned long)((uintptr_t)pc - (uintptr_t)info.dli_fbase - 1));
    return text;
}

static void lines_of(const void *pc, std::vector<std::string> &ret_lines)
{
    Dl_info info;
    char path[400];
    std::vector<std::vector<std::string>> lines;
    if (!dladdr(pc, &info) || !module_file(info, path, sizeof path))
        return;
    lines_in(path, address_in_file(pc, info), lines);
    if (!lines.empty())
        ret_lines.insert(ret_lines.end(), lines[0].begin(), lines[0].end());
}

static std::string joined(const std::vector<std::string> &lines)
{
    std::string text;
    for (size_t i = 0; i < lines.size() && i < PLACES; i++)
        text += (i ? " < " : "") + lines[i];
    return text.empty() ? "an unknown place" : text;
}

std::string place_of(const void *pc)
{
    std::vector<std::string> lines;
    char text[32];
    if (pc)
        lines_of(pc, lines);
    snprintf(text, sizeof text, "%p", pc);
    return lines.empty() ? text : joined(lines);
}

std::vector<std::string> places_of(const std::vector<const void *> &pcs)
{
    enum { LOT = 1000 }; /* addresses of one command line */
    std::vector<std::string> places(pcs.size());
    for (size_t first = 0; first < pcs.size();) {
        Dl_info info;
        char path[400];
        const bool named = dladdr(pcs[first], &info) && module_file(info, path, sizeof path);
        const void *module = named ? info.dli_fbase : nullptr;
        std::string addresses = named ? address_in_file(pcs[first], info) : std::string();
        size_t end = first + 1;
        for (; named && end < pcs.size() && end < first + LOT && dladdr(pcs[end], &info) && info.dli_fbase == module; end++)
            addresses += address_in_file(pcs[end], info);
        std::vector<std::vector<std::string>> lines;
        if (named)
            lines_in(path, addresses, lines);
        for (size_t i = first; i < end; i++)
            places[i] = i - first < lines.size() ? joined(lines[i - first]) : joined({});
        first = end;
    }
    return places;
}

std::string place_of_stack(const std::vector<void *> &stack)
{
    std::vector<std::string> lines;
    for (size_t i = 0; i < stack.size() && lines.size() < PLACES; i++)
        lines_of(stack[i], lines);
    return joined(lines);
}

/* The address of code whose lower half this is. */
struct Half {
    uint32_t low;
    uintptr_t found;
};

static int match_half(struct dl_phdr_info *info, size_t, void *argument)
{
    Half &half = *(Half *)argument;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &p = info->dlpi_phdr[i];
        const uintptr_t start = info->dlpi_addr + p.p_vaddr;
        if (p.p_type == PT_LOAD && (p.p_flags & PF_X) && (uint32_t)(half.low - (uint32_t)start) < p.p_memsz)
            half.found = start + (uint32_t)(half.low - (uint32_t)start);
    }
    return half.found != 0;
}

static std::string place_of_half(uint32_t low)
{
    Half half = {low, 0};
    if (low)
        dl_iterate_phdr(match_half, &half);
    return place_of((const void *)half.found);
}

static std::string thread_name(unsigned thread)
{
    const ThreadView &v = block.executor->fibers[thread].view;
    return "thread (" + std::to_string(v.thread.x) + "," + std::to_string(v.thread.y) + "," + std::to_string(v.thread.z) + ")";
}

/* Who made an access that stands in a cell. */
static std::string who_did(const Access &a)
{
    const Operation &o = operation(a.operation);
    if (o.stream == 0)
        return "the host, " + place_of_half(a.pc);
    if (in_operation && a.operation == running && block.executor)
        return (a.flags & (BY_LANES | BY_WARPS) ? "several threads, one of them " : "") + thread_name(a.thread) + " of block " + block_name(a.interval) + ", " + place_of_half(a.pc);
    return std::string(o.name) + " of stream " + std::to_string(o.stream) + (a.pc ? ", " + place_of_half(a.pc) : std::string()) + ", submitted at " + place_of_stack(o.made_at);
}

static std::string who_does(const void *pc)
{
    if (!in_operation)
        return "the host, " + place_of_stack(stack_now());
    const Operation &o = operation(running);
    if (block.executor)
        return std::string(o.name) + " of stream " + std::to_string(o.stream) + ", " + fiber_name(block.executor->current) + ", " + place_of(pc);
    return std::string(o.name) + " of stream " + std::to_string(o.stream) + ", submitted at " + place_of_stack(o.made_at);
}

static std::string where(const Area &area, uintptr_t address)
{
    const std::string offset = (address < area.base ? " - " + std::to_string(area.base - address) : " + " + std::to_string(address - area.base));
    if (&area == &dynamic_shared)
        return "dynamic shared memory" + offset;
    if (area.is_shared)
        return "static shared memory"; /* where in its module says nothing */
    return (area.kind == MEMORY_DEVICE ? "device memory" : area.kind == MEMORY_PINNED ? "pinned memory" : "registered memory") + offset + " of " + std::to_string(area.bytes) + " bytes allocated at " +
           place_of_stack(area.made_at);
}

static const char *kind_name(AccessKind kind)
{
    static const char *const names[] = {"read", "write", "atomic read", "atomic update"};
    return names[kind];
}

/* A race by what lacks: a barrier, a wait of a stream, a wait of the host. */
static std::string title(const char *what, const Access *other)
{
    if (!other || strcmp(what, "race") != 0)
        return what;
    if (other->operation == running && in_operation)
        return "race between threads";
    return !in_operation || operation(other->operation).stream == 0 ? "race between the host and a stream" : "race between streams";
}

void report_access(const char *what, const Area &area, uintptr_t address, size_t bytes, AccessKind kind, const void *pc, const Access *other, const char *other_did)
{
    std::string detail = std::string(kind_name(kind)) + " of " + std::to_string(bytes) + " bytes by " + who_does(pc);
    if (other)
        detail += "; the " + std::string(other_did) + " before by " + who_did(*other);
    report(title(what, other).c_str(), detail + "; " + where(area, address));
}

} /* namespace check */
} /* namespace simt */
