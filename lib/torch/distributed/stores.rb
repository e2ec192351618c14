# frozen_string_literal: true

module Torch
  module Distributed
    # PyTorch's name for what {Store#queue_pop} raises.
    QueueEmptyError = NotFoundError

    # A key-value store by which processes find each other and agree on small things. Keys and values are
    # strings of bytes; a key may be a symbol. Calls that wait can be interrupted, let other threads run,
    # and raise {TimeoutError} when the store's {#timeout} is over.
    #
    # @!method set(key, value)
    #   Stores a value, replacing what was there. `store[key] = value` does the same.
    # @!method get(key)
    #   Waits for a key.
    #   @return [String] its value
    # @!method add(key, delta)
    #   Adds to a counter that is kept as decimal text; an absent one counts as 0.
    #   @return [Integer] the new total
    # @!method compare_set(key, expected, desired)
    #   Stores `desired` if the present value is `expected` (an absent key equals an empty one).
    #   @return [String] `desired` if it was stored, else the present value
    # @!method delete_key(key)
    #   @return [Boolean] whether the key was there
    # @!method num_keys
    #   @return [Integer] how many keys there are, the store's own among them
    # @!method wait(keys, timeout = nil)
    #   Returns once all keys exist. A queue that holds something counts as a key.
    #   @param timeout [Numeric, nil] seconds; nil: the store's own
    # @!method check(keys)
    #   @return [Boolean] whether all keys exist now
    # @!method append(key, value)
    #   Adds bytes to the end of a value, or makes it.
    # @!method multi_get(keys)
    #   @return [Array<String>] the values, once all keys exist
    # @!method multi_set(keys, values)
    #   Stores several values.
    # @!method list_keys
    #   The store's own keys and queues are not among them; a {PrefixStore}'s are those beneath its prefix, without it.
    #   @return [Array<String>] the keys, in no order
    #   @raise [UnsupportedError] if the server is a PyTorch without it
    # @!method queue_push(key, value)
    #   Adds a value at the end of a queue, which the first value makes. Queues are apart from keys of the same name.
    #   @raise [UnsupportedError] if the server is a PyTorch without queues, or the store a {FileStore}
    # @!method queue_pop(key, block: true, timeout: nil)
    #   Takes the value at the start of a queue. Each value goes to one caller; one that is taken just when the
    #   thread is interrupted goes back to the queue's end.
    #   @param block [Boolean] whether to wait while the queue is empty
    #   @param timeout [Numeric, nil] seconds to wait; nil: the store's own
    #   @return [String]
    #   @raise [QueueEmptyError] without `block`, if the queue is empty
    #   @raise [UnsupportedError] if the server is a PyTorch without queues, or the store a {FileStore}
    # @!method queue_len(key)
    #   @return [Integer] how many values a queue holds; 0 if there is none
    #   @raise [UnsupportedError] if the server is a PyTorch without queues, or the store a {FileStore}
    # @!method barrier(key, world_size, timeout = nil)
    #   Returns once `world_size` callers have come. The key counts them, so each barrier needs a key of its own; and
    #   a caller that timed out still counts.
    #   @param timeout [Numeric, nil] seconds; nil: the store's own
    #   @raise [TimeoutError] telling how many had come
    #   @raise [UnsupportedError] if the server is a PyTorch without barriers
    # @!method has_extended_api?
    #   @return [Boolean] whether append, multi_get and multi_set are one step each. Towards a server of PyTorch 1.13
    #     they are not, but made of several.
    # @!method close
    #   Lets go of the connection, and of the server if this process is the master. No other thread may be using
    #   the store.
    # @!method closed?
    #   @return [Boolean] whether {#close} was called
    # @!attribute timeout
    #   @return [Float] how many seconds its calls wait
    class Store
      class << self
        # Store stands for its kinds; only they can be made.
        def new(*args, **options)
          return super unless equal?(Store)

          raise NotImplementedError, "Store is abstract: use TCPStore, FileStore, HashStore or PrefixStore"
        end
      end

      # Another store with the same contents and a connection of its own: a call that waits on one does not hold up
      # those on the other. A clone of the master's keeps its server alive.
      # @return [Store] of the same kind
      def clone
        @groups ||= [-1]
        _clone
      end

      # A value that no program stores: compare_set answers with it where a key is absent, in one step and without making the key.
      ABSENT = "\xE5tddp: absent\x00\xB1\x9C\x42\xF7".b.freeze
      private_constant :ABSENT

      alias_method :[]=, :set

      # As a Hash's, it does not wait for the key; {#get} does.
      #
      # @param key [String, Symbol]
      # @return [String, nil] its value; nil if it is absent
      def [](key)
        fetch(key, nil)
      end

      # @overload fetch(key)
      # @overload fetch(key, default)
      # @overload fetch(key) { |key| … }
      # @param key [String, Symbol]
      # @return [String, Object] its value, without waiting for the key; the default, or the block's value, if it is absent
      # @raise [KeyError] if it is absent, and there is neither
      def fetch(key, *default)
        raise ArgumentError, "fetch: expected a key and at most one default, got #{1 + default.size} arguments" if default.size > 1

        value = compare_set(key, ABSENT, ABSENT)
        return value unless value == ABSENT
        return yield key if block_given?
        return default.first unless default.empty?

        raise KeyError.new("key not found: #{key.inspect}", receiver: self, key: key)
      end

      # @param key [String, Symbol]
      # @return [Boolean] whether it has a value now
      def key?(key)
        !fetch(key, nil).nil?
      end

      # PyTorch's name for {#timeout=}.
      # @param seconds [Numeric]
      def set_timeout(seconds) # standard:disable Naming/AccessorMethodName
        self.timeout = seconds
      end

      # @return [String]
      def inspect
        "#<#{self.class.name}>"
      end

      # @api private
      # @return [Integer] how many groups this process made on this store before
      def next_group
        (@groups ||= [-1])[0] += 1
      end

      # Stores hold connections and are shared by reference.
      # @raise [TypeError] always
      def initialize_copy(_other)
        raise TypeError, "a #{self.class.name} cannot be copied; clone gives another connection to the same store"
      end
    end

    # A store served by one process over TCP, in the protocol of PyTorch's TCPStore.
    #
    # The master listens to its own host alone if `host` is `localhost` or a loopback address, else on every address.
    # Variables of its environment limit what its clients can do: `TDDP_STORE_MAX_KEY_BYTES`, `_MAX_VALUE_BYTES`,
    # `_MAX_KEYS`, `_MAX_REQUEST_BYTES`, `_MAX_TOTAL_BYTES`, `_MAX_BUFFERED_BYTES`, `_MAX_CLIENTS`, `_MAX_PENDING` and
    # `TDDP_STORE_CLIENT_TIMEOUT_MS`. With `TDDP_STORE_SECRET` set to the same text everywhere (or `TDDP_STORE_SECRET_FILE`,
    # naming a file that has it) the master serves only those who know it. docs/several-machines.md has the table.
    class TCPStore < Store
      # @!attribute [r] host
      #   @return [String] the server's host
      # @!attribute [r] port
      #   @return [Integer] the server's port, the real one where 0 was given

      # @param host [String] name or address of the process that serves
      # @param port [Integer] its port; 0 on the master lets the system choose
      # @param world_size [Integer, nil] clients that will come; nil: unknown, does not wait
      # @param is_master [Boolean] whether this process serves
      # @param wait_for_workers [Boolean] whether the master waits until all clients are there
      # @param timeout [Numeric] seconds, of this call and of the store's later ones
      # @param multi_tenant [Boolean] whether masters of this process on one port share one server: the second and
      #   later ones then are its clients and do not wait; it stays until all are closed
      # @param master_listen_fd [Integer, IO, nil] a listening socket for the master to take over
      # @param use_libuv [Boolean] accepted for PyTorch's scripts: there is only one kind of server here
      def initialize(host, port, world_size = nil, is_master = false, wait_for_workers: true, timeout: DEFAULT_TIMEOUT,
        multi_tenant: false, master_listen_fd: nil, use_libuv: true) # standard:disable Lint/UnusedMethodArgument
        super()
        shared = Tenants.server_at(port) if is_master && multi_tenant
        if shared
          _share(shared)
          self.timeout = timeout
        else
          _open(host, port, world_size, is_master, wait_for_workers, timeout, listener(master_listen_fd))
        end
        Tenants.add(self) if is_master && multi_tenant
      end

      # @return [String]
      def inspect
        "#<#{self.class.name} #{host}:#{port}>"
      end

      private

      # The store closes what it takes over.
      def listener(socket)
        return socket unless socket.respond_to?(:fileno)

        socket.autoclose = false
        socket.fileno
      end

      # The stores of this process that share servers, or may.
      #
      # @api private
      module Tenants
        LOCK = Mutex.new
        @stores = ObjectSpace::WeakMap.new

        class << self
          # @return [TCPStore, nil] one whose server has this port
          def server_at(port)
            LOCK.synchronize do
              @stores.keys.find { |store| !store.closed? && store.port == port && @stores[store] == Process.pid }
            end
          end

          # @param store [TCPStore]
          def add(store)
            LOCK.synchronize { @stores[store] = Process.pid }
          end
        end
      end
      private_constant :Tenants
    end

    # A store kept in a file, for processes of one machine. Use a fresh path for each run.
    class FileStore < Store
      # @return [String] the file
      attr_reader :path

      # @param path [String] made when absent
      # @param world_size [Integer, nil] after so many have released it the file is removed
      # @param timeout [Numeric] seconds that its calls wait
      def initialize(path, world_size = nil, timeout: DEFAULT_TIMEOUT)
        super()
        @path = path.to_s.dup.freeze
        _open(@path, world_size, timeout)
      end
    end

    # A store inside this process, for threads and tests.
    class HashStore < Store
      # @param timeout [Numeric] seconds that its calls wait
      def initialize(timeout: DEFAULT_TIMEOUT)
        super()
        _open(timeout)
      end
    end

    # A view of another store in which key "k" is "prefix/k".
    class PrefixStore < Store
      # @return [String]
      attr_reader :prefix

      # @return [Store] the store that it looks into
      attr_reader :underlying_store

      # @param prefix [String]
      # @param store [Store]
      def initialize(prefix, store)
        super()
        @prefix = prefix.to_s.dup.freeze
        @underlying_store = store
        _open(@prefix, store)
      end
    end
  end
end
