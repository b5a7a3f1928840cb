// csrc/moe/panels.cuh on the host: the walk of down_combine_fp8_sm90.cuh over panels, with CTAs whose warps are fibers.
//
// Which fiber goes on is random. A store reaches memory at a random time, at the latest when a thread that it happened before
// adds to a counter of the GPU. Whoever reads checks what it reads; when nobody can go on it is a deadlock. `broken` breaks a
// rule.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <ucontext.h>
#include <vector>
#define __device__
#define __forceinline__ inline
struct int2 {
    int x, y;
};
#include "../csrc/moe/panels.cuh"

namespace {
using namespace oxmoe::panels;

enum Broken {
    kNothing,
    kArrivesBeforeStore,
    kReadsAfterGivingBack,
    kWaitsForNoBuffer,
    kHandsOverAtOnce,
    kAnnouncesAtOnce,
    kWeightsAtOnce
};
enum Result { kRight, kWrong, kDeadlock };

struct Write {
    int number;  // in the order of the program, so that runs are the same
    int* to;
    int value;
    bool done = false;
    void arrive() {
        if (!done) *to = value;
        done = true;
    }
};
struct InOrder {
    bool operator()(const std::shared_ptr<Write>& a, const std::shared_ptr<Write>& b) const { return a->number < b->number; }
};
// Those that have not arrived.
struct Writes : std::set<std::shared_ptr<Write>, InOrder> {
    void add(const Writes& others) {
        for (auto& write : others) {
            if (!write->done) insert(write);
        }
        for (auto write = begin(); write != end();) write = (*write)->done ? erase(write) : std::next(write);
    }
};

struct Barrier {
    int count = 1, pending = 1, phase = 0;
    Writes carried;
    void init(int arrivals) { count = pending = arrivals, phase = 0; }
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    std::function<void()> body;
    std::function<bool()> condition;
    bool over = false;
    Writes before;  // what happened before the fiber's next step
};

struct Machine {
    std::mt19937 random;
    std::vector<std::unique_ptr<Fiber>> fibers;
    Fiber* now = nullptr;
    ucontext_t scheduler;
    bool wrong = false;
    int writes = 0;

    static Machine* self;
    static void enter() {
        Fiber* fiber = self->now;
        fiber->body();
        fiber->over = true;
        swapcontext(&fiber->context, &self->scheduler);
    }
    void start(std::function<void()> body) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *fibers.back();
        fiber.body = std::move(body);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    void wait(std::function<bool()> condition) {
        now->condition = std::move(condition);
        swapcontext(&now->context, &scheduler);
    }
    void pause() {
        wait([] { return true; });
    }
    Result run() {
        self = this;
        std::vector<unsigned> speed;  // some fibers are late throughout
        for (size_t i = 0; i < fibers.size(); ++i) speed.push_back(1 + random() % 16);
        for (;;) {
            std::vector<Fiber*> able;
            bool all_over = true;
            for (size_t i = 0; i < fibers.size(); ++i) {
                Fiber& fiber = *fibers[i];
                all_over &= fiber.over;
                if (!fiber.over && (!fiber.condition || fiber.condition())) able.insert(able.end(), speed[i], &fiber);
            }
            if (all_over) return wrong ? kWrong : kRight;
            if (able.empty()) return kDeadlock;
            now = able[random() % able.size()];
            if (!now->before.empty() && random() % 4 == 0)
                (*std::next(now->before.begin(), random() % now->before.size()))->arrive();
            now->condition = nullptr;
            swapcontext(&scheduler, &now->context);
        }
    }

    // Barriers of a CTA; arriving hands over what happened before.
    void arrive(Barrier& barrier) {
        pause();
        barrier.carried.add(now->before);
        if (--barrier.pending == 0) barrier.pending = barrier.count, ++barrier.phase;
    }
    void wait(Barrier& barrier, uint32_t parity) {
        wait([&barrier, parity] { return (barrier.phase & 1) != int(parity); });
        now->before.add(barrier.carried);
    }
    // Counters of the GPU.
    void add(int& counter) {
        pause();
        for (auto& write : now->before) write->arrive();
        now->before.clear();
        ++counter;
    }
    void store(int* to, int value) {
        pause();
        now->before.insert(std::make_shared<Write>(Write{writes++, to, value}));
    }
    void check(bool right) { wrong |= !right; }
};
Machine* Machine::self = nullptr;

struct Ring {
    int slot = 0;
    uint32_t parity = 0;
    void advance(int stages) {
        if (++slot == stages) slot = 0, parity ^= 1;
    }
};

struct Case {
    int ctas, buffers, panels, chunks, stages, broken;
};

struct HostCta {
    Machine& machine;
    const Case& c;
    std::vector<int>&written, &read;
    std::vector<std::vector<Block>> lists;  // of each chunk
    Barrier stored[8], ready[8], free[8], full[14], empty[14], meeting;
    int weights[14];

    int buffers() const { return c.buffers; }
    void wait_stored(int slot, uint32_t parity) {
        if (c.broken != kAnnouncesAtOnce) machine.wait(stored[slot], parity);
    }
    void add_written(int panel) { machine.add(written[panel]); }
    void wait_written(int panel) {
        if (c.broken != kHandsOverAtOnce) machine.wait([=] { return written[panel] >= c.ctas; });
    }
    void arrive_ready(int slot) { machine.arrive(ready[slot]); }
    void wait_read(int panel) {
        machine.wait([=] { return read[panel] >= c.ctas; });
    }
    void arrive_free(int slot) { machine.arrive(free[slot]); }
    void wait_free(int slot, uint32_t parity) {
        if (c.broken != kWaitsForNoBuffer) machine.wait(free[slot], parity);
    }
    void meet() {
        const uint32_t parity = meeting.phase & 1;
        machine.arrive(meeting);
        machine.wait(meeting, parity);
    }

    // The walks of the kernel's warps.
    static int tag(int panel, int cta, int block) { return (panel * 64 + cta) * 16 + block + 1; }
    void copy_weights() {
        Ring ring;
        for (int chunk = 0; chunk < c.chunks; ++chunk) {
            meet(), meet();
            const auto& list = lists[chunk];
            for (int panel = 0; panel < c.panels; ++panel) {
                for (int at = 0; at < int(list.size()); at = list[at].run_end) {
                    for (int k = 0; k < 2; ++k, ring.advance(c.stages)) {
                        if (c.broken != kWeightsAtOnce) machine.wait(empty[ring.slot], ring.parity ^ 1);
                        weights[ring.slot] = (panel * 1024 + list[at].expert) * 2 + k;
                        machine.arrive(full[ring.slot]);
                    }
                }
            }
        }
    }
    void signal(int warp) {
        Turn turn;
        for (int chunk = 1; chunk <= c.chunks; ++chunk) {
            meet(), meet();
            const int end = chunk * c.panels;
            if (warp == 1)
                announce(*this, turn, end);
            else if (warp == 2)
                hand_over(*this, turn, end);
            else
                give_back(*this, turn, end);
        }
    }
    void consume(int cta, int consumer, std::vector<int>& cells) {
        Turn turn;
        Ring ring;
        for (int chunk = 0; chunk < c.chunks; ++chunk) {
            meet(), meet();
            const auto& list = lists[chunk];
            const int count = int(list.size());
            const bool none = consumer >= count;
            struct {
                Turn turn;
                int block = -1;
                bool first = false, last = false;
            } outputs;
            auto store = [&] {
                if (outputs.last && c.broken == kArrivesBeforeStore) machine.arrive(stored[outputs.turn.slot]);
                if (outputs.block >= 0) {
                    machine.store(&cells[(outputs.turn.slot * c.ctas + cta) * 16 + outputs.block],
                                  tag(outputs.turn.panel, cta, outputs.block));
                }
                if (outputs.last && c.broken != kArrivesBeforeStore) machine.arrive(stored[outputs.turn.slot]);
            };
            for (int panel = 0; panel < c.panels; ++panel, turn.advance(c.buffers)) {
                for (int at = 0; at < count; at = list[at].run_end) {
                    Ring behind = ring;
                    behind.advance(c.stages);
                    machine.wait(full[ring.slot], ring.parity);
                    machine.wait(full[behind.slot], behind.parity);
                    int j = at + ((at ^ consumer) & 1);
                    const int end = list[at].run_end;
                    auto release = [&] { machine.arrive(empty[ring.slot]), machine.arrive(empty[behind.slot]); };
                    if (j >= end) release();
                    for (; j < end; j += 2) {
                        if (outputs.first) oxmoe::panels::wait_free(*this, outputs.turn);
                        const int expected = (panel * 1024 + list[j].expert) * 2;
                        machine.check(weights[ring.slot] == expected && weights[behind.slot] == expected + 1);
                        store();
                        machine.check(weights[ring.slot] == expected && weights[behind.slot] == expected + 1);
                        if (j + 2 >= end) release();
                        outputs = {turn, j, j < 2, j + 2 >= count};
                    }
                    ring = behind, ring.advance(c.stages);
                }
                if (none) {
                    oxmoe::panels::wait_free(*this, turn);
                    machine.arrive(stored[turn.slot]);
                }
            }
            if (!none) {
                if (outputs.first) oxmoe::panels::wait_free(*this, outputs.turn);
                store();
            }
        }
    }
    void sum(std::vector<int>& cells, const std::vector<std::unique_ptr<HostCta>>& all) {
        Turn turn;
        for (int chunk = 0; chunk < c.chunks; ++chunk) {
            meet(), meet();
            for (int panel = 0; panel < c.panels; ++panel, turn.advance(c.buffers)) {
                machine.wait(ready[turn.slot], turn.parity);
                if (c.broken == kReadsAfterGivingBack) machine.add(read[turn.panel]);
                for (int cta = 0; cta < c.ctas; ++cta) {
                    for (int block = 0; block < int(all[cta]->lists[chunk].size()); ++block) {
                        machine.pause();
                        machine.check(cells[(turn.slot * c.ctas + cta) * 16 + block] == tag(turn.panel, cta, block));
                    }
                }
                if (c.broken != kReadsAfterGivingBack) machine.add(read[turn.panel]);
            }
        }
    }
};
}  // namespace

extern "C" int panels_walk(uint32_t seed, int ctas, int buffers, int panels, int chunks, int stages, int broken) {
    Machine machine;
    machine.random.seed(seed);
    const Case c{ctas, buffers, panels, chunks, stages, broken};
    std::vector<int> written(panels * chunks), read(panels * chunks), cells(buffers * ctas * 16);
    std::vector<std::unique_ptr<HostCta>> all;
    for (int i = 0; i < ctas; ++i) {
        all.push_back(std::unique_ptr<HostCta>(new HostCta{machine, c, written, read, {}, {}, {}, {}, {}, {}, {}, {}}));
        HostCta& cta = *all.back();
        for (int chunk = 0; chunk < chunks; ++chunk) {
            std::vector<Block> list(machine.random() % 11);
            int expert = 0;
            for (Block& block : list) block = {expert += machine.random() % 2, 0, 64, 0};
            for (int j = int(list.size()) - 1; j >= 0; --j) {
                const bool ends = j + 1 == int(list.size()) || list[j + 1].expert != list[j].expert;
                list[j].run_end = ends ? j + 1 : list[j + 1].run_end;
            }
            cta.lists.push_back(list);
        }
        for (int b = 0; b < 8; ++b) cta.stored[b].init(2), cta.ready[b].init(1), cta.free[b].init(1);
        for (int s = 0; s < 14; ++s) cta.full[s].init(1), cta.empty[s].init(2);
        cta.meeting.init(7);
    }
    for (int i = 0; i < ctas; ++i) {
        HostCta* cta = all[i].get();
        machine.start([=] { cta->copy_weights(); });
        for (int warp = 1; warp < 4; ++warp) machine.start([=] { cta->signal(warp); });
        for (int consumer = 0; consumer < 2; ++consumer) machine.start([=, &cells] { cta->consume(i, consumer, cells); });
        machine.start([=, &cells, &all] { cta->sum(cells, all); });
    }
    return machine.run();
}

// Blocks of CTA `cta` in chunk `chunk`; returns how many.
extern "C" int panels_divide(const int* offsets, const int* slot_of_place, int experts, int chunk, int chunks, int chunk_slots,
                             int cta, int ctas, Block* list) {
    constexpr int kThreads = 128;
    const Division<kThreads> division{offsets,    slot_of_place,      experts, chunk * chunk_slots, (chunk + 1) * chunk_slots,
                                      chunk == 0, chunk == chunks - 1};
    std::vector<int2> places(experts);
    std::vector<int> before(kThreads + 1);
    for (int i = 0; i < kThreads; ++i) before[i + 1] = before[i] + division.count(i, places.data());
    const Share share(before[kThreads], cta, ctas);
    for (int i = 0; i < kThreads; ++i) division.list(i, places.data(), before[i], share, list);
    return share.end - share.first;
}
